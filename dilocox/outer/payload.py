"""Payloads: what travels between islands, when in an inner step, and what becomes of the merged result."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.apply import Apply
from dilocox.outer.merge.merged import Merged
from dilocox.outer.optimisers.protocol import OuterOptimizer, Range
from dilocox.outer.optimisers.sgd import Identity
from dilocox.outer.schedule import Schedule
from dilocox.outer.state import FragmentState
from dilocox_kernels.checksum import checksum64


class Point(Enum):
    """Where in an inner step a payload syncs."""

    AFTER_BACKWARD = "after backward"
    AFTER_UPDATE = "after the inner optimiser's step"


class Payload(Protocol):
    point: Point
    needs_anchor: bool

    def check(self, optimiser: OuterOptimizer, schedule: Schedule) -> None:
        """Raise ConfigError for an outer optimiser or a schedule that makes no sense with this payload."""

    def minuend(self, state: FragmentState, start: int, stop: int) -> Tensor | None:
        """What the values of the flat range [start, stop) are subtracted from before they are sent; None: nothing."""

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        merged: Merged,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> int:
        """Take the merged range: change state and its `values`, one tensor a span.

        Returns the `checksum64` at merged.start of the fp32 range that must now be bit-identical on all islands.
        """


class Displacement:
    """The pseudo-gradient Δ = anchor − local weights, after H inner steps; the outer optimiser moves the anchor."""

    point = Point.AFTER_UPDATE
    needs_anchor = True

    def check(self, optimiser: OuterOptimizer, schedule: Schedule) -> None:
        if isinstance(optimiser, Identity):
            raise ConfigError(
                "outer_optimizer", "none", "the anchor would never move", "Choose nesterov, momentum, sgd or adam"
            )

    def minuend(self, state: FragmentState, start: int, stop: int) -> Tensor | None:
        return state.anchor[start:stop]

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        merged: Merged,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> int:
        here = slice(merged.start, merged.stop)
        slots = {name: slot[here] for name, slot in state.slots.items()}
        return optimiser.advance(Range(state.anchor[here], slots, values), merged, apply, state.outer_steps + 1)


class Gradient:
    """The gradient itself, before every inner step: synchronous data parallelism between islands."""

    point = Point.AFTER_BACKWARD
    needs_anchor = False

    def check(self, optimiser: OuterOptimizer, schedule: Schedule) -> None:
        if not isinstance(optimiser, Identity):
            raise ConfigError(
                "outer_optimizer",
                type(optimiser).__name__,
                "payload=gradient hands the merged gradient to the inner optimiser and has no anchor to move",
                "Set outer_optimizer=none",
            )
        if not schedule.after(1, 1).round_ends:
            raise ConfigError(
                "schedule",
                type(schedule).__name__,
                "payload=gradient averages the gradients of every inner step, or the islands would come apart",
                "Set schedule=every_h schedule.inner_steps=1, or payload=displacement",
            )

    def minuend(self, state: FragmentState, start: int, stop: int) -> Tensor | None:
        return None

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        merged: Merged,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> int:
        mean = merged.decode()
        for part, gradient in zip(merged.codes.spans.cut(mean), values, strict=True):
            gradient.copy_(part)
        return checksum64(mean, merged.start)
