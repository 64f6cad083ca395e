"""Which program works on which tile of a range, as tables on the device."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PLANS_KEPT = 64


class Plan(NamedTuple):
    """Tables (int64 [n, 3] each) for a layout of spans and a size of tiles; a row of the first two is a program."""

    whole: Tensor
    """Tiles inside one span whose values are aligned there: tile, address of its first value, 0."""
    partial: Tensor
    """All other tiles: tile, first span that meets it, last + 1."""
    spans: Tensor
    """Start, stop, address of the values."""

    @property
    def tiles(self) -> int:
        return len(self.whole) + len(self.partial)


def plan_tiles(
    numel: int,
    bounds: Sequence[tuple[int, int]],
    values: Sequence[Tensor],
    tile: int,
    alignment: int,
    device: torch.device,
) -> Plan:
    """Deal out the tiles of a range; kept for later calls with the same layout and the same tensors.

    `values`: one tensor a span, all of one dtype, or none where a kernel touches none; `alignment` in bytes.
    """
    addresses = tuple(value.data_ptr() for value in values)
    itemsize = values[0].itemsize if values else 0
    return _plan(numel, tuple(bounds), addresses, itemsize, tile, alignment, device)


@lru_cache(maxsize=PLANS_KEPT)
def _plan(
    numel: int,
    bounds: tuple[tuple[int, int], ...],
    addresses: tuple[int, ...],
    itemsize: int,
    tile: int,
    alignment: int,
    device: torch.device,
) -> Plan:
    edges = torch.tensor(bounds, dtype=torch.int64).view(-1, 2)
    starts, stops = edges[:, 0].contiguous(), edges[:, 1].contiguous()
    address = torch.tensor(addresses or [0] * len(bounds), dtype=torch.int64)
    tiles = torch.arange(-(-numel // tile))
    begin, end = tiles * tile, (tiles + 1) * tile
    first = torch.searchsorted(stops, begin, right=True)
    last = torch.searchsorted(starts, end)
    if len(bounds) == 0:
        whole, here = torch.zeros_like(tiles, dtype=torch.bool), begin
    else:
        span = first.clamp(max=len(bounds) - 1)
        here = address[span] + (begin - starts[span]) * itemsize
        whole = (first < last) & (starts[span] <= begin) & (stops[span] >= end) & (here % alignment == 0)
    rows_of_whole = torch.stack([tiles, here, torch.zeros_like(tiles)], dim=1)[whole]
    rows_of_partial = torch.stack([tiles, first, last], dim=1)[~whole]
    spans = torch.stack([starts, stops, address], dim=1)
    return Plan(rows_of_whole.to(device), rows_of_partial.to(device), spans.to(device))
