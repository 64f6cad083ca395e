"""Initial weights by global name, so that every layout starts from the same model."""

import hashlib
import itertools
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from dilocox.config import ModelConfig
from dilocox.shards import Box, Shard

BLOCK = 1 << 22
"""Elements drawn at once: the memory this takes, whatever the size of the parameter. Part of what a seed means."""


def initialise(shards: Iterable[Shard], model: ModelConfig, seed: int) -> None:
    """Fill weights in place: norms 1, matrices normal(0, init_std), those that end a residual branch
    normal(0, init_std / √(2 · layers)), as Megatron does.

    A matrix is drawn on the CPU in blocks of rows, each from a generator seeded by (seed, name, block); a rank draws
    the blocks in which it holds a part.
    """
    for shard in shards:
        if "norm" in shard.name:
            shard.values.fill_(1.0)
            continue
        ends_branch = shard.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        std = model.init_std / (2 * model.layers) ** 0.5 if ends_branch else model.init_std
        for start, box in shard.box.rectangles(shard.start, shard.stop):
            values = shard.values[start - shard.start :][: box.numel].view(box.shape)
            _fill(values, shard.name, box, std, seed)


def _fill(values: Tensor, name: str, box: Box, std: float, seed: int) -> None:
    """Fill `values`, the part `box` of the parameter `name`.

    The parameter is seen as rows × the rest; leading dimensions of a box that are cut singly (gate and up of fc1)
    count as rows.
    """
    *lead, rows, columns = box.global_shape
    *lead_offset, row, column = box.offset
    whole = (prod(lead) * rows, columns)
    for index in itertools.product(*(range(n) for n in box.shape[:-2])):
        above = 0
        for size, offset, i in zip(lead, lead_offset, index, strict=True):
            above = above * size + offset + i
        _fill_rows(values[index], name, whole, above * rows + row, column, std, seed)


def _fill_rows(values: Tensor, name: str, whole: tuple[int, int], row: int, column: int, std: float, seed: int) -> None:
    """Fill `values` [rows, columns], which lies at (row, column) of the parameter of shape `whole`."""
    rows_per_block = max(1, BLOCK // whole[1])
    done = 0
    while done < len(values):
        block, within = divmod(row + done, rows_per_block)
        rows_drawn = min(rows_per_block, whole[0] - block * rows_per_block)
        count = min(rows_drawn - within, len(values) - done)
        generator = torch.Generator().manual_seed(_seed(seed, name, block))
        drawn = torch.randn(rows_drawn, whole[1], generator=generator)
        part = drawn[within : within + count, column : column + values.shape[1]]
        values[done : done + count].copy_(part.mul_(std))
        done += count


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
