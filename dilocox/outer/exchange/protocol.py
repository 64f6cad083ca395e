"""What an exchange must do: bring every island to the same merged pseudo-gradient, in codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dilocox.outer.fragments import Fragment
from dilocox.outer.merge.mean import Merge
from dilocox.outer.transport.protocol import Transport
from dilocox_kernels.wire import Header


@dataclass(frozen=True)
class Received:
    """One verified message: its header, and its body (in host memory) as a view of the buffer that it arrived in."""

    header: Header
    body: Tensor


@dataclass(frozen=True)
class Delivery:
    """What all islands know of a flat range when the exchange is done: codes, and how to merge them."""

    start: int
    stop: int
    bodies: list[Tensor]
    weights: list[float]
    merge: Merge


class Job(Protocol):
    """One fragment's sync, as an exchange sees it. Messages are made once and kept: a repeat sends the same bytes."""

    fragment: Fragment
    merge: Merge

    def encoded(self, start: int, stop: int) -> Tensor:
        """This island's message about a flat range (hop 0)."""

    def merged(self, start: int, stop: int, received: Sequence[Received]) -> Tensor:
        """The islands' messages about a range, in island order, merged and encoded again (hop 1)."""

    def buffer(self, start: int, stop: int) -> Tensor:
        """Memory for another island's message about a range."""

    def accept(self, message: Tensor, *, island: int, hop: int, start: int, stop: int) -> Received:
        """Verify a message; raises SyncError when it is damaged or of another sync.

        That islands have come apart is noted and raised once the exchange is complete.
        """


class Exchange(Protocol):
    hops: int
    """How often a pseudo-gradient is encoded on its way."""

    def residual_ranges(self, fragment: Fragment, island: int, islands: int) -> list[tuple[int, int]]:
        """The flat range that this island encodes at each hop."""

    def messages(self, fragment: Fragment, islands: int) -> list[tuple[int, int]]:
        """The flat ranges of this island's messages of hop 0, which cover the fragment once."""

    def run(self, job: Job, transport: Transport, deadline: float) -> list[Delivery]:
        """Exchange a fragment among all islands; raises SyncError. Deliveries cover it once, in order."""

    def bytes_sent(self, encoded_bytes: int, islands: int) -> int:
        """Bytes that one island sends for a pseudo-gradient of `encoded_bytes`, headers not counted."""
