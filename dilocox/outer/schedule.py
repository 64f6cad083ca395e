"""Schedules: which fragments are sent and which are applied after an inner step."""

from typing import NamedTuple, Protocol

from dilocox.errors import ConfigError


class Due(NamedTuple):
    """Indices of fragments, each in the order in which every island handles them."""

    send: tuple[int, ...]
    apply: tuple[int, ...]
    round_ends: bool
    """After this step every fragment has been synced equally often."""


class Schedule(Protocol):
    def after(self, inner_step: int, fragments: int) -> Due:
        """What is due after inner step `inner_step` (counted from 1) of a run with so many fragments."""

    def check(self, steps: int) -> None:
        """Raise ConfigError when a run of `steps` inner steps would end between rounds."""


class EveryH:
    """A blocking sync of everything after every H inner steps (DiLoCo, arXiv 2311.08105, algorithm 1)."""

    def __init__(self, inner_steps: int) -> None:
        if inner_steps < 1:
            raise ConfigError(
                "schedule.inner_steps", inner_steps, "a round has at least one inner step", "Set it to 1 or more"
            )
        self.inner_steps = inner_steps

    def after(self, inner_step: int, fragments: int) -> Due:
        if inner_step % self.inner_steps:
            return Due((), (), False)
        everything = tuple(range(fragments))
        return Due(everything, everything, True)

    def check(self, steps: int) -> None:
        if steps % self.inner_steps:
            rounds = max(1, round(steps / self.inner_steps))
            raise ConfigError(
                "steps",
                steps,
                f"is no multiple of schedule.inner_steps={self.inner_steps}: the last steps would never be exchanged",
                f"Set steps={rounds * self.inner_steps}",
            )
