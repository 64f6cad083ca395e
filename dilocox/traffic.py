"""Bytes on the wire: how many islands will send each other, and how many ranks of an island do send each other."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dilocox.config import Config
from dilocox.method import build_roles
from dilocox.outer.exchange.protocol import Received
from dilocox.outer.fragments import Fragment
from dilocox.outer.roles import Roles
from dilocox.outer.transport.share import share_fixed
from dilocox.parameters import flat_numel, holdings, total_parameters
from dilocox.shards import whole_shard
from dilocox.topology import Lane
from dilocox_kernels.wire import HEADER_BYTES, Header

VOTE_BYTES = 16
"""What a lane tells each lane of its group after an exchange: the number of the sync and a verdict."""

_HEADER = Header(
    nonfinite=False,
    fingerprint=0,
    number=1,
    island=0,
    fragment=0,
    hop=0,
    start=0,
    numel=0,
    tokens=1,
    steps=1,
    documents=1,
    checksum=0,
)


@dataclass(frozen=True)
class Rehearsal:
    """One sync of one lane, in bytes: sent (votes and headers included), and held in memory at its end."""

    bytes_sent: int
    own_messages: int
    received_messages: int


class _SizedJob:
    """An exchange's job whose messages have sizes but no bytes; implements `exchange.protocol.Job`."""

    def __init__(self, fragment: Fragment, roles: Roles) -> None:
        self.fragment = fragment
        self.merge = roles.merge
        self.own: dict[tuple[int, int, int], Tensor] = {}
        self.received_bytes = 0
        self._codec = roles.codec

    def encoded(self, start: int, stop: int) -> Tensor:
        return self.own.setdefault((0, start, stop), self._message(start, stop))

    def merged(self, start: int, stop: int, received: Sequence[Received]) -> Tensor:
        return self.own.setdefault((1, start, stop), self._message(start, stop))

    def buffer(self, start: int, stop: int) -> Tensor:
        message = self._message(start, stop)
        self.received_bytes += message.numel()
        return message

    def accept(self, message: Tensor, *, island: int, hop: int, start: int, stop: int) -> Received:
        return Received(_HEADER, message[HEADER_BYTES:])

    def _message(self, start: int, stop: int) -> Tensor:
        return torch.empty(HEADER_BYTES + self._codec.encoded_bytes(stop - start), dtype=torch.uint8, device="meta")


class _CountingTransport:
    """Sends nothing, and counts; implements `transport.protocol.Transport` and its pending messages."""

    def __init__(self, island: int, islands: int) -> None:
        self.island = island
        self.islands = islands
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, peer: int, message: Tensor) -> Self:
        self.bytes_sent += message.numel()
        return self

    def receive(self, peer: int, buffer: Tensor) -> Self:
        self.bytes_received += buffer.numel()
        return self

    def wait(self, deadline: float) -> None:
        """Everything has arrived already."""

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


def rehearse(numel: int, roles: Roles, island: int, islands: int) -> Rehearsal:
    """Run the exchange of a flat buffer of `numel` elements (gaps included) with messages that have sizes only."""
    alignment = roles.codec.alignment
    fragment = Fragment("all", [whole_shard("flat", torch.empty(numel, device="meta"))], alignment)
    transport, job = _CountingTransport(island, islands), _SizedJob(fragment, roles)
    roles.exchange.run(job, transport, deadline=0.0)
    share_fixed(transport, bytes(VOTE_BYTES), deadline=0.0)
    return Rehearsal(
        bytes_sent=transport.bytes_sent,
        own_messages=sum(message.numel() for message in job.own.values()),
        received_messages=job.received_bytes,
    )


@dataclass(frozen=True)
class BetweenTraffic:
    """Predicted traffic between islands, as `SyncReport` will count it when no sync has to be repeated."""

    islands: int
    parameters: int
    steps: int
    syncs: int
    sent: dict[Lane, tuple[int, ...]]
    """Bytes that a lane sends in a sync, on each island."""

    def bytes_per_sync(self, island: int) -> int:
        """All that an island sends in one sync."""
        return sum(sent[island] for sent in self.sent.values())

    @property
    def bytes_total(self) -> int:
        """All that all islands send in the whole run."""
        return self.syncs * sum(self.bytes_per_sync(island) for island in range(self.islands))

    @property
    def bits_per_parameter(self) -> float:
        """What island 0 sends in a sync, over the parameters of the model."""
        return 8 * self.bytes_per_sync(0) / self.parameters

    @property
    def allreduce_bytes(self) -> float:
        """What an island would send in an inner step to average fp32 gradients by a ring: 2(K−1)/K · 4 B each."""
        return 2 * (self.islands - 1) / self.islands * 4 * self.parameters

    @property
    def reduction(self) -> float:
        """fp32 ring all-reduce in every step, over what this run sends; infinite for one island."""
        sent = self.syncs * self.bytes_per_sync(0)
        return self.steps * self.allreduce_bytes / sent if sent else float("inf")


def predict_between(config: Config, vocab_size: int) -> BetweenTraffic:
    """Traffic between islands of a run of this configuration; `vocab_size` is the tokenizer's."""
    roles = build_roles(config)

    @lru_cache
    def sent(numel: int) -> tuple[int, ...]:
        return tuple(rehearse(numel, roles, island, config.islands).bytes_sent for island in range(config.islands))

    return BetweenTraffic(
        islands=config.islands,
        parameters=total_parameters(config.model, vocab_size),
        steps=config.steps,
        syncs=sum(len(roles.schedule.after(step, 1).apply) for step in range(1, config.steps + 1)),
        sent={
            lane: sent(flat_numel(holdings(config, vocab_size, lane), roles.codec.alignment))
            for lane in config.island.layout.lanes()
        },
    )


def _all(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return ranks - 1.0


def _other_share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


_SENT: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce": (0, _there_and_back),
    "allreduce_coalesced": (0, _there_and_back),
    "broadcast": (0, _other_share),
    "reduce": (0, _other_share),
    "scatter": (0, _other_share),
    "gather": (1, _other_share),
    "allgather": (1, _others),
    "allgather_coalesced": (1, _others),
    "all_gather_single": (1, _others),
    "all_gather_single_coalesced": (1, _others),
    "reduce_scatter": (1, _other_share),
    "reduce_scatter_single": (1, _other_share),
    "reduce_scatter_single_coalesced": (1, _other_share),
    "alltoall": (1, _other_share),
    "all_to_all_single": (1, _other_share),
    "send": (0, _all),
}
"""By method of ProcessGroup: which argument holds the tensors, and what this rank sends of them in a group of n."""


class InsideMeter:
    """Counts the bytes that this process sends to other ranks of its island, through torch.distributed.

    Every collective and send of torch.distributed ends in a method of ProcessGroup, whatever thread or alias it came
    from; these methods are wrapped. Lane groups use gloo's back end directly and are not counted here: they count
    themselves. Not seen is what goes past these methods: functional collectives, and the reducer of torch's own DDP.

    What one rank sends, by the ring algorithms of NCCL, for n ranks and tensors of B bytes: all-reduce 2(n−1)/n · B;
    reduce-scatter and all-to-all (n−1)/n · B of the input; all-gather (n−1) · B of the input; send B; broadcast,
    reduce, gather and scatter (n−1)/n · B, which is the mean over the ranks, since n−1 copies travel.

    Islands that take turns in one process are told apart by `current`: whoever gets the turn sets it. It is no
    property of a thread, because backward runs in threads of autograd.
    """

    def __init__(self) -> None:
        self.current = 0
        """The island that has the turn."""
        self._sent: defaultdict[int, float] = defaultdict(float)
        self._originals: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        """Sent so far by the current island's rank here."""
        return round(self._sent[self.current])

    def install(self) -> None:
        """Start counting; raises RuntimeError when this meter counts already."""
        if self._originals:
            raise RuntimeError("this meter is installed already")
        for name, (argument, share) in _SENT.items():
            # Looked up in the dictionary: what getattr answers would not bind to a group when it is put back.
            self._originals[name] = vars(ProcessGroup)[name]
            setattr(ProcessGroup, name, self._counted(getattr(ProcessGroup, name), argument, share))

    def remove(self) -> None:
        """Stop counting; the counts stay."""
        for name, original in self._originals.items():
            setattr(ProcessGroup, name, original)
        self._originals.clear()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _counted(self, method: Any, argument: int, share: Callable[[int], float]) -> Callable[..., Any]:
        def counted(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            sent = share(group.size()) * _bytes(args[argument])
            with self._lock:
                self._sent[self.current] += sent
            return method(group, *args, **kwargs)

        return counted


def _bytes(tensors: Tensor | Iterable[Any]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)
