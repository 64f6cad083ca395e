"""What an outer optimiser must do: move the anchor against the merged pseudo-gradient."""

from typing import Protocol

from torch import Tensor


class OuterOptimizer(Protocol):
    """Stateless apart from its settings: tensors live in `slots`, so that a step can be done range by range.

    Every operation is elementwise with one rounding each (no fused multiply-add), so that all islands get equal bits.
    """

    slots: tuple[str, ...]
    """Names of the fp32 state tensors, each as long as the anchor, all starting at zero."""

    def step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
        """Update `anchor` and `slots` in place; `delta` is overwritten. `step` counts outer steps from 1."""
