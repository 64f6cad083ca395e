"""Islands inside one process: an in-memory transport, and the turns that its threads take.

K islands run the same training loop in K threads, strictly one at a time: a thread that must wait for a message
passes the turn to the next island, in a fixed cyclic order, and goes on when the turn comes back and the message is
there. So a run is deterministic, and K islands can share one Megatron world: every rank switches islands at the same
points of the program.
"""

import threading
import time
from collections.abc import Callable

from torch import Tensor

from dilocox.errors import DilocoxError, SyncError


class StoppedError(DilocoxError):
    """Another island of this process failed. No SyncError, because nobody may try again, vote, or start a collective:
    on another rank of the world the same island may still be running."""


class Turns:
    """Lets `islands` threads run one at a time, in turn; `on_turn(island)` is called whenever one goes on."""

    def __init__(self, islands: int, on_turn: Callable[[int], None] = lambda island: None) -> None:
        self.islands = islands
        self.seconds_away = [0.0] * islands
        """How long each island has waited while others had the turn."""
        self._on_turn = on_turn
        self._changed = threading.Condition()
        self._turn = 0
        self._running = set(range(islands))
        self.failure: tuple[int, BaseException] | None = None
        """The island that failed first and its error; everybody else stops with StoppedError."""

    def start(self, island: int) -> None:
        """Wait for this island's first turn."""
        with self._changed:
            self._wait_for_turn(island)

    def until(self, island: int, ready: Callable[[], bool], waiting_for: str) -> None:
        """Pass the turn on until `ready()`; raises SyncError when nobody is left who could make it so.

        Raises StoppedError when another island has failed.
        """
        while not ready():
            with self._changed:
                if self._running == {island}:
                    raise SyncError(f"island {island} waits for {waiting_for}, but all other islands have ended")
                self._pass_on(island)
                self._wait_for_turn(island)

    def end(self, island: int, error: BaseException | None = None) -> None:
        """This island's thread is done, well or not; the next one goes on."""
        with self._changed:
            if error is not None and self.failure is None:
                self.failure = (island, error)
            self._running.discard(island)
            self._pass_on(island)

    def _pass_on(self, island: int) -> None:
        later = [(island + step) % self.islands for step in range(1, self.islands + 1)]
        self._turn = next((i for i in later if i in self._running), island)
        self._changed.notify_all()

    def _wait_for_turn(self, island: int) -> None:
        started = time.monotonic()
        self._changed.wait_for(lambda: self._turn == island or self.failure is not None)
        self.seconds_away[island] += time.monotonic() - started
        if self.failure is not None:
            raise StoppedError(f"island {self.failure[0]} failed")
        self._on_turn(island)


class Hub:
    """What is under way in one lane group in memory, shared by its islands."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        """Sent and not yet received, by sender, receiver, and how many the one had sent to the other before."""


class MemoryTransport:
    """Messages through a Hub. `send` copies, so a sender's buffer is free at once."""

    def __init__(self, hub: Hub, island: int) -> None:
        self.island = island
        self.islands = hub.turns.islands
        self.bytes_sent = 0
        self.bytes_received = 0
        self._hub = hub
        self._sent = [0] * self.islands
        self._received = [0] * self.islands

    def send(self, peer: int, message: Tensor) -> "_Sent":
        self._hub.messages[self.island, peer, self._sent[peer]] = message.clone()
        self._sent[peer] += 1
        self.bytes_sent += message.numel()
        return _Sent()

    def receive(self, peer: int, buffer: Tensor) -> "_Awaited":
        key = (peer, self.island, self._received[peer])
        self._received[peer] += 1
        self.bytes_received += buffer.numel()
        return _Awaited(self._hub, key, buffer)

    def abort(self) -> None:
        """Nothing to break: an island that fails takes the process with it."""

    def close(self) -> None:
        """Nothing to release: the messages belong to the hub."""


class _Sent:
    def wait(self, deadline: float) -> None:
        """A message in memory is delivered when it is sent."""


class _Awaited:
    def __init__(self, hub: Hub, key: tuple[int, int, int], buffer: Tensor) -> None:
        self._hub, self._key, self._buffer = hub, key, buffer

    def wait(self, deadline: float) -> None:
        peer, island, _ = self._key
        self._hub.turns.until(island, lambda: self._key in self._hub.messages, f"a message of island {peer}")
        message = self._hub.messages.pop(self._key)
        if message.numel() != self._buffer.numel():
            raise SyncError(f"island {peer} sent {message.numel()} bytes where {self._buffer.numel()} were expected")
        self._buffer.copy_(message)


class MemoryLaneGroup:
    """One lane of K islands in one process; there is nothing that could break, hence nothing to rebuild."""

    def __init__(self, hub: Hub, *, island: int, lane: str) -> None:
        self.island = island
        self.islands = hub.turns.islands
        self.name = lane
        self._turns = hub.turns
        self._transport = MemoryTransport(hub, island)

    @property
    def transport(self) -> MemoryTransport:
        return self._transport

    def clock(self) -> float:
        return time.monotonic() - self._turns.seconds_away[self.island]

    def rebuild(self) -> None:
        raise SyncError("islands in one process share its memory: there is no connection to rebuild")

    def close(self) -> None:
        self._transport.close()


def alone(lane: str) -> MemoryLaneGroup:
    """The lane group of a single island: no peers, nothing is ever sent."""
    return MemoryLaneGroup(Hub(Turns(1)), island=0, lane=lane)
