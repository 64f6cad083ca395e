"""What an outer optimiser must do: move the anchor against the merged pseudo-gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dilocox.outer.apply import Apply
from dilocox.outer.merge.merged import Merged


@dataclass(frozen=True)
class Range:
    """What an outer step changes of a flat range."""

    anchor: Tensor
    """fp32 [n]"""
    slots: dict[str, Tensor]
    """fp32 [n] each"""
    values: Sequence[Tensor]
    """Local weights, one tensor a span."""


class OuterOptimizer(Protocol):
    """Stateless apart from its settings: tensors live in `slots`, so that a step can be done range by range.

    Every operation is elementwise with one rounding each (no fused multiply-add), so that all islands get equal bits.
    """

    slots: tuple[str, ...]
    """Names of the fp32 state tensors, each as long as the anchor, all starting at zero."""

    def advance(self, target: Range, merged: Merged, apply: Apply, step: int) -> int:
        """Change the range in place, local weights by `apply`; `step` counts outer steps from 1.

        Returns the `checksum64` of the new anchor at merged.start.
        """
