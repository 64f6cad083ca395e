"""Fragments: which elements of an island this rank owns between islands, laid out in one flat buffer.

Ownership. A shard that only this rank holds is owned here. A shard that several ranks of the island hold (data
parallel copies, norms under tensor parallelism, tied embeddings on the first and last stage) is split among them:
each owns a contiguous part of its group's elements, keeps the outer state of that part, exchanges it with the same
lane of the other islands, and broadcasts the result to the other holders. So every element has exactly one owner in an
island, and all copies take the owner's bits.

Layout. Owned parts follow each other in one flat buffer; each starts at a multiple of the codec's alignment, so that
no block of a codec crosses a tensor or an owner's boundary. The gaps hold zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dilocox.shards import Shard
from dilocox_kernels.spans import Spans

CHUNK_ELEMENTS = 1 << 22
"""Flat buffers are encoded, sent and applied in ranges of so many elements, which bounds all scratch memory."""


@dataclass(frozen=True)
class Piece:
    """A part [start, stop) of `shards[index].values` that one rank owns; `offset` is its place in the flat buffer."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Handover:
    """A part of a shard that `owner` (a global rank) broadcasts to its replicas group after a sync."""

    index: int
    start: int
    stop: int
    owner: int
    group: ProcessGroup


class Fragment:
    """A set of shards that are synced together, and this rank's part of the work.

    `shards` are the island's, in an order that is the same on every rank of each replicas group; `alignment` is in
    elements. `numel` is the length of the flat buffer, gaps included; `owned` counts real elements.
    """

    def __init__(self, name: str, shards: Sequence[Shard], alignment: int) -> None:
        self.name = name
        self.shards = list(shards)
        self.alignment = alignment
        self.pieces: list[Piece] = []
        self.handovers: list[Handover] = []
        self.numel = 0
        for group, members in by_replicas(self.shards):
            self._divide(group, members)
        self.owned = sum(piece.stop - piece.start for piece in self.pieces)

    def _divide(self, group: ProcessGroup | None, members: list[int]) -> None:
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        me = 0 if group is None else dist.get_rank(group)
        for part, index, start, stop in _cut([self.shards[i].numel for i in members], len(ranks), self.alignment):
            if group is not None:
                self.handovers.append(Handover(members[index], start, stop, ranks[part], group))
            if part == me:
                self.pieces.append(Piece(members[index], start, stop, self.numel))
                self.numel += _round_up(stop - start, self.alignment)

    def ranges(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Consecutive flat ranges of at most `chunk` elements (rounded to the alignment); one empty range if empty."""
        chunk = max(self.alignment, chunk // self.alignment * self.alignment)
        for start in range(0, max(self.numel, 1), chunk):
            yield start, min(start + chunk, self.numel)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[Piece, slice, slice]]:
        """Pieces that meet the flat range: (piece, slice of the shard's values, slice of the range)."""
        for piece in self.pieces:
            low, high = max(start, piece.offset), min(stop, piece.offset + piece.stop - piece.start)
            if low < high:
                shift = piece.start - piece.offset
                yield piece, slice(low + shift, high + shift), slice(low - start, high - start)

    def spans(self, start: int, stop: int) -> Spans:
        """Where real elements lie in the flat range [start, stop)."""
        return Spans(stop - start, tuple((part.start, part.stop) for _, _, part in self.overlaps(start, stop)))

    def owned_values(self, values: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """What of `values` (one tensor a shard) lies in the flat range; views, one a span."""
        return [values[piece.index][inside] for piece, inside, _ in self.overlaps(start, stop)]

    def read(self, values: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        """Collect the flat range [start, stop) of `values` (one tensor a shard) into fp32 `out`, gaps as zeros."""
        out.zero_()
        for piece, inside, outside in self.overlaps(start, stop):
            out[outside].copy_(values[piece.index][inside])

    def hand_over(self, values: Sequence[Tensor]) -> None:
        """Broadcast owned parts inside the island, so that every holder of a shard has its owner's bits.

        Groups are served in the order of their ranks on every rank, so that no two groups can wait for each other.
        Within a group all broadcasts are in flight at once, in the order of its shards; the tensors are the
        receivers' weights themselves and are free once all have completed.
        """
        work = [
            dist.broadcast(values[h.index][h.start : h.stop], src=h.owner, group=h.group, async_op=True)
            for h in self.handovers
        ]
        for pending in work:
            pending.wait()

    def owned_shards(self, flat: Tensor, start: int = 0) -> list[Shard]:
        """Name the parts of a flat tensor that holds the range from `start` on, for checkpoints."""
        stop = start + flat.numel()
        named = []
        for piece, inside, outside in self.overlaps(start, stop):
            shard = self.shards[piece.index]
            named.append(shard.narrow(shard.start + inside.start, shard.start + inside.stop, flat[outside]))
        return named


def whole(shards: Sequence[Shard], alignment: int) -> list[Fragment]:
    """One fragment of everything: classic DiLoCo."""
    return [Fragment("all", shards, alignment)]


def flat_values(shards: Sequence[Shard]) -> list[Tensor]:
    return [shard.values for shard in shards]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def by_replicas(shards: Sequence[Shard]) -> list[tuple[ProcessGroup | None, list[int]]]:
    """Indices of the shards of each replicas group, lone shards first, then groups ordered by their ranks."""
    groups: dict[tuple[int, ...], tuple[ProcessGroup | None, list[int]]] = {}
    for index, shard in enumerate(shards):
        ranks = () if shard.replicas is None else tuple(dist.get_process_group_ranks(shard.replicas))
        groups.setdefault(ranks, (shard.replicas, []))[1].append(index)
    return [groups[ranks] for ranks in sorted(groups)]


def _cut(sizes: Sequence[int], parts: int, alignment: int) -> Iterator[tuple[int, int, int, int]]:
    """Deal tensors of these sizes to `parts` owners, evenly in blocks: yields (owner, tensor, start, stop)."""
    blocks = [-(-size // alignment) for size in sizes]
    total = sum(blocks)
    bounds = [total * part // parts for part in range(parts + 1)]
    first = 0
    for index, (size, count) in enumerate(zip(sizes, blocks, strict=True)):
        for part in range(parts):
            low, high = max(bounds[part], first), min(bounds[part + 1], first + count)
            if low < high:
                yield part, index, (low - first) * alignment, min((high - first) * alignment, size)
        first += count
