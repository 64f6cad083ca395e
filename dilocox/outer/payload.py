"""Payloads: what travels between islands, when in an inner step, and what becomes of the merged result."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.apply import Apply
from dilocox.outer.optimisers.protocol import OuterOptimizer
from dilocox.outer.optimisers.sgd import Identity
from dilocox.outer.schedule import Schedule
from dilocox.outer.state import FragmentState


class Point(Enum):
    """Where in an inner step a payload syncs."""

    AFTER_BACKWARD = "after backward"
    AFTER_UPDATE = "after the inner optimiser's step"


class Payload(Protocol):
    point: Point
    needs_anchor: bool

    def check(self, optimiser: OuterOptimizer, schedule: Schedule) -> None:
        """Raise ConfigError for an outer optimiser or a schedule that makes no sense with this payload."""

    def read(self, state: FragmentState, values: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        """Write what is to be sent of the flat range [start, stop) into fp32 `out`."""

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        start: int,
        stop: int,
        merged: Tensor,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> Tensor:
        """Take the merged range: change state and `values`; `merged` is overwritten.

        Returns the fp32 range that must now be bit-identical on all islands (for the checksum).
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

    def read(self, state: FragmentState, values: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        state.fragment.read(values, start, stop, out)
        out.neg_().add_(state.anchor[start:stop])

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        start: int,
        stop: int,
        merged: Tensor,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> Tensor:
        anchor = state.anchor[start:stop]
        slots = {name: slot[start:stop] for name, slot in state.slots.items()}
        optimiser.step(anchor, slots, merged, state.outer_steps + 1)
        for piece, inside, outside in state.fragment.overlaps(start, stop):
            apply.write(anchor[outside], values[piece.index][inside])
        return anchor


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

    def read(self, state: FragmentState, values: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        state.fragment.read(values, start, stop, out)

    def absorb(
        self,
        state: FragmentState,
        values: Sequence[Tensor],
        start: int,
        stop: int,
        merged: Tensor,
        optimiser: OuterOptimizer,
        apply: Apply,
    ) -> Tensor:
        for piece, inside, outside in state.fragment.overlaps(start, stop):
            values[piece.index][inside].copy_(merged[outside])
        return merged
