"""Lane groups over gloo: point-to-point TCP between the processes of one lane.

Protocol of a connection. All islands share a store. Generation g of a lane group is built by every island's process
of that lane under the key prefix `lane-group/<g>/<lane>/`: each publishes that it is there, then gloo connects every
pair. After a failed sync each process asks the store to move from g to g+1 (compare-and-set: the first one moves it,
the others find it moved) and joins whatever generation the store then names. A process that fails again, or comes
late, meets the others there. Groups of older generations are dropped.

Gloo is plaintext, unauthenticated, and opens a connection on ephemeral ports between each pair of processes of a
lane: it is for networks that one trusts, or for a private tunnel.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from dilocox.errors import HandshakeError, SyncError

_GENERATION = "lane-group/generation"
_UNUSED_TAG = 2**31 - 1


class GlooTransport:
    """Point-to-point messages over one gloo process group (rank = island)."""

    def __init__(self, group: ProcessGroup, island: int, islands: int) -> None:
        self.island = island
        self.islands = islands
        self.bytes_sent = 0
        self.bytes_received = 0
        self._group: ProcessGroup | None = group
        self._sent = [0] * islands
        self._received = [0] * islands

    def send(self, peer: int, message: Tensor) -> "_GlooPending":
        try:
            work = self._open().send([message], peer, self._sent[peer])
        except RuntimeError as error:
            raise SyncError(f"sending to island {peer} failed: {error}") from error
        self._sent[peer] += 1
        self.bytes_sent += message.numel()
        return _GlooPending(work, message, f"sending to island {peer}")

    def receive(self, peer: int, buffer: Tensor) -> "_GlooPending":
        try:
            work = self._open().recv([buffer], peer, self._received[peer])
        except RuntimeError as error:
            raise SyncError(f"receiving from island {peer} failed: {error}") from error
        self._received[peer] += 1
        self.bytes_received += buffer.numel()
        return _GlooPending(work, buffer, f"receiving from island {peer}")

    def abort(self) -> None:
        """Gloo has no call for this, but it breaks all connections of a group when a wait on one of them times out."""
        if self._group is not None and self.islands > 1:
            somebody = (self.island + 1) % self.islands
            with contextlib.suppress(RuntimeError):
                never = self._group.recv([torch.empty(1, dtype=torch.uint8)], somebody, _UNUSED_TAG)
                never.wait(timedelta(milliseconds=1))
        self._group = None

    def close(self) -> None:
        self._group = None

    def _open(self) -> ProcessGroup:
        if self._group is None:
            raise SyncError("the lane group is not connected")
        return self._group


class _GlooPending:
    def __init__(self, work: Work, buffer: Tensor, action: str) -> None:
        self._work = work
        self._buffer = buffer  # gloo does not keep the tensor alive
        self._action = action

    def wait(self, deadline: float) -> None:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            self._work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise SyncError(f"{self._action} failed: {reason}") from error


class GlooLaneGroup:
    """One lane of every island, connected over gloo; see the module for the protocol."""

    def __init__(self, store: Store, *, island: int, islands: int, lane: str, address: str, timeout_s: float) -> None:
        """`address` is this machine's address, as the other islands reach it."""
        self.island = island
        self.islands = islands
        self.name = lane
        self._store = store
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._generation = 0
        self._transport = self._join("", "0")

    @property
    def transport(self) -> GlooTransport:
        return self._transport

    def clock(self) -> float:
        return time.monotonic()

    def rebuild(self) -> None:
        counted = (self._transport.bytes_sent, self._transport.bytes_received)
        self._transport.abort()
        self._transport = self._join(str(self._generation), str(self._generation + 1))
        self._transport.bytes_sent, self._transport.bytes_received = counted

    def close(self) -> None:
        self._transport.close()

    def _join(self, expected: str, wanted: str) -> GlooTransport:
        """Move the store on from generation `expected`, unless another process has, and connect the one it names."""
        try:
            self._generation = int(self._store.compare_set(_GENERATION, expected, wanted))
            return self._connect()
        except RuntimeError as error:
            raise SyncError(
                f"lane {self.name}: the rendezvous does not answer: {str(error).splitlines()[0]}. "
                "`dilocox coordinator` must run, and be reachable, until all islands have ended"
            ) from error

    def _connect(self) -> GlooTransport:
        store = PrefixStore(f"lane-group/{self._generation}/{self.name}", self._store)
        store.set(f"present/{self.island}", "")
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = self._timeout
        try:
            group: Any = ProcessGroupGloo(store, self.island, self.islands, options)
        except RuntimeError as error:
            absent = [i for i in range(self.islands) if not store.check([f"present/{i}"])]
            who = f"islands {absent} did not come" if absent else str(error).splitlines()[0]
            raise SyncError(
                f"lane {self.name}: no connection within {self._timeout.total_seconds():.0f} s: {who}. "
                "All islands must run, reach each other on all ports, and use the same number of islands"
            ) from error
        return GlooTransport(group, self.island, self.islands)


def shake_hands(
    store: Store,
    identity: Mapping[str, object],
    *,
    island: int,
    islands: int,
    lane: str,
    leader: bool,
    timeout_s: float,
) -> None:
    """Refuse to train with islands whose settings differ; every rank calls it, each island's `leader` publishes.

    `identity` maps field names to JSON values that must be equal everywhere. Each rank reads every island's and raises
    HandshakeError with the first differing field and both values, so both sides say the same. A rendezvous serves one
    start of a run: settings and addresses of an earlier one would be taken for those of islands yet to come.
    """
    met = f"met/{island}/{lane}"
    if store.check([met]):
        raise HandshakeError(
            f"island {island} has met the others at this rendezvous before, and what an earlier start left there "
            "misleads. End all islands, restart `dilocox coordinator`, and start them again"
        )
    if leader:
        store.set(f"identity/{island}", json.dumps(identity, sort_keys=True))
    mine = json.loads(json.dumps(identity))
    for other in range(islands):
        try:
            store.wait([f"identity/{other}"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise HandshakeError(
                f"island {other} did not come to the rendezvous within {timeout_s:.0f} s. "
                f"Start it, or set islands to the number that run (islands={islands} here)"
            ) from error
        theirs = json.loads(store.get(f"identity/{other}"))
        for field in sorted(mine.keys() | theirs.keys()):
            if mine.get(field) != theirs.get(field):
                raise HandshakeError(
                    f"{field} differs: {mine.get(field)!r} on island {island}, "
                    f"{theirs.get(field)!r} on island {other}. "
                    "Start all islands with the same settings"
                )
    store.set(met, "")


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`: the one at which the islands beyond it reach us."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket: sets the route, sends nothing
        return str(probe.getsockname()[0])
