"""Settings of the operations that are not the format's: how to round, and how the anchor moves."""

from dataclasses import dataclass
from enum import Enum

MAX_ISLANDS = 32
"""Bodies that one decode, requantise or outer step takes."""


@dataclass(frozen=True)
class Stochastic:
    """Round up or down at random, so that the mean over keys is what was to be sent.

    The random numbers are those of Philox4x32-10 (Salmon et al. 2011) at counter (position // 4, round) under `key`:
    they depend on nothing else, and are the same on every back end. Give each island, fragment and hop a key of its
    own, or their rounding errors add up instead of averaging out.
    """

    key: int
    """u64"""
    round: int
    """u32"""

    def __post_init__(self) -> None:
        if not 0 <= self.key < 1 << 64:
            raise ValueError(f"key={self.key}: expected an unsigned number of 64 bits")
        if not 0 <= self.round < 1 << 32:
            raise ValueError(f"round={self.round}: expected an unsigned number of 32 bits")


class Rule(Enum):
    """What becomes of the merged pseudo-gradient Δ, momentum b and anchor θ at learning rate η and momentum μ."""

    SGD = 0
    """θ ← θ − η Δ"""
    MOMENTUM = 1
    """b ← μ b + Δ; θ ← θ − η b"""
    NESTEROV = 2
    """b ← μ b + Δ; θ ← θ − η (Δ + μ b)"""


@dataclass(frozen=True)
class OuterRule:
    """An outer optimiser that the kernels know; `momentum` is 0 and unused for SGD."""

    kind: Rule
    lr: float
    momentum: float

    @property
    def needs_momentum(self) -> bool:
        """There is a momentum buffer."""
        return self.kind is not Rule.SGD
