"""Transports: how bytes get from a lane to the same lane of another island, and nothing else.

Exchanges are written against this interface only, so that another carrier (one port, TLS, a relay) fits in by
implementing it. Messages between two islands arrive whole and in the order in which they were sent: the n-th `receive`
from a peer gets that peer's n-th `send`. A sender's buffer is free when its `wait` returns.
"""

from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A message under way."""

    def wait(self, deadline: float) -> None:
        """Block until it is done; `deadline` is a `time.monotonic()` value. Raises SyncError, naming the peer."""


class Transport(Protocol):
    """The connections of one lane group, seen from one island."""

    island: int
    islands: int
    bytes_sent: int
    """Everything handed to `send` so far, framing of ours included, that of TCP/IP excluded."""
    bytes_received: int
    """The same for `receive`, whether it came or not."""

    def send(self, peer: int, message: Tensor) -> Pending:
        """Start to send a contiguous uint8 CPU tensor to island `peer`."""

    def receive(self, peer: int, buffer: Tensor) -> Pending:
        """Start to receive into a uint8 CPU tensor of exactly the length that the peer sends."""

    def abort(self) -> None:
        """Break all connections, so that peers notice at once; nothing can be sent or received any more.

        Whoever leaves an exchange midway must do so: its next message would be taken for one that is still missing.
        """

    def close(self) -> None:
        """Let go of the connections; messages under way may still arrive."""


class LaneGroup(Protocol):
    """The same lane of every island: where the transport comes from, and how it is made anew after a failure."""

    island: int
    islands: int
    name: str

    @property
    def transport(self) -> Transport: ...

    def clock(self) -> float:
        """Seconds, for differences: time in which this island could run."""

    def rebuild(self) -> None:
        """Replace the transport by a new one among all islands; raises SyncError, naming who did not come."""

    def close(self) -> None: ...
