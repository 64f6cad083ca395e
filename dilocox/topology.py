"""Who sits where and who talks to whom: layouts, lanes and lane groups, as data one can print.

Ranks of an island are numbered as Megatron does by default: tensor parallel fastest, then data, then pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Lane:
    """A rank's place inside its island. The same lane of every island forms a lane group."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}"


@dataclass(frozen=True)
class Layout:
    """The shape of an island: how many ranks along each parallel dimension."""

    tp: int
    pp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def lane(self, rank: int) -> Lane:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside an island of {self.world_size} ranks")
        return Lane(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, lane: Lane) -> int:
        return lane.tp + self.tp * (lane.dp + self.dp * lane.pp)

    def lanes(self) -> Iterator[Lane]:
        return (self.lane(rank) for rank in range(self.world_size))
