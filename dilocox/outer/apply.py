"""Apply: how local weights take the new anchor."""

from typing import Protocol

from torch import Tensor


class Apply(Protocol):
    local_becomes_anchor: bool
    """After an apply the local weights equal the anchor, bit for bit in fp32."""
    local_weight: float
    """What the outer step's kernel leaves of the local weights, in [0, 1)."""

    def write(self, anchor: Tensor, local: Tensor) -> None:
        """The same for outer optimisers without a kernel: change `local` given fp32 `anchor`, both [n]."""


class Overwrite:
    """Local weights become the anchor (DiLoCo, arXiv 2311.08105)."""

    local_becomes_anchor = True
    local_weight = 0.0

    def write(self, anchor: Tensor, local: Tensor) -> None:
        local.copy_(anchor)
