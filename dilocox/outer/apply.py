"""Apply: how local weights take the new anchor."""

from typing import Protocol

from torch import Tensor


class Apply(Protocol):
    local_becomes_anchor: bool
    """After an apply the local weights equal the anchor, bit for bit in fp32."""

    def write(self, anchor: Tensor, local: Tensor) -> None:
        """Change `local` (1-D, the model's or the main weights' dtype) given fp32 `anchor` of the same length."""


class Overwrite:
    """Local weights become the anchor (DiLoCo, arXiv 2311.08105)."""

    local_becomes_anchor = True

    def write(self, anchor: Tensor, local: Tensor) -> None:
        local.copy_(anchor)
