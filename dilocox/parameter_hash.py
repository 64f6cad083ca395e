"""A hash of a model's weights that does not depend on how ranks share them."""

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor

from dilocox.outer.island_group import IslandGroup
from dilocox.shards import Box, Shard
from dilocox_kernels.checksum import checksum64


def parameter_hash(shards: Sequence[Shard], island_group: IslandGroup) -> str:
    """16 hex digits over all parameters of an island, each element once; collective over its ranks.

    Σ over names n of odd(n) · checksum64(parameter n, flat) mod 2^64, where odd(n) comes from the name. Both sums can
    be split anyhow, so every layout gives the same digits for the same bits.
    """
    total = sum(
        _odd(shard.name) * checksum64(values, start)
        for shard in shards
        if shard.replicas is None or dist.get_rank(shard.replicas) == 0
        for start, values in _runs(shard)
    )
    limbs = [float(total >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]
    sums = island_group.sum(limbs)  # float64 is exact here up to 2^37 ranks
    return f"{sum(int(limb) << 16 * place for place, limb in enumerate(sums)) % (1 << 64):016x}"


def _odd(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _runs(shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """The shard's values in parts that are contiguous in the whole parameter: (flat position there, values)."""
    for flat, box in shard.box.rectangles(shard.start, shard.stop):
        begin = flat - shard.start
        length = _run_length(box)
        for run in range(box.numel // length if length else 0):
            part = shard.values[begin + run * length : begin + (run + 1) * length]
            yield _global_position(box, run * length), part


def _run_length(box: Box) -> int:
    """Elements of a box that follow each other in the whole parameter."""
    dimension = len(box.shape)
    while dimension > 0 and box.shape[dimension - 1] == box.global_shape[dimension - 1]:
        dimension -= 1
    return prod(box.shape[max(dimension - 1, 0) :])


def _global_position(box: Box, flat: int) -> int:
    """Where the `flat`-th element of a box lies in the whole parameter, flattened."""
    position, stride = 0, 1
    for size, offset, whole in zip(reversed(box.shape), reversed(box.offset), reversed(box.global_shape), strict=True):
        flat, index = divmod(flat, size)
        position += (offset + index) * stride
        stride *= whole
    return position
