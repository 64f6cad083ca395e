"""Shards: the pieces of named parameters that one rank lends to the outer loop and to checkpoints.

A model-parallel rank holds, of each parameter, a rectangular box (its tensor-parallel part, or the whole); an optimizer
that is itself sharded holds only a flat range of that box. A `Shard` says both, so that whoever gets it can name every
element globally, whatever the layout. It is the only thing that passes between an island, the outer loop and a
checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Box:
    """A rectangular part of a parameter: `shape` elements starting at `offset` inside `global_shape`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = zip(self.global_shape, self.offset, self.shape, strict=True)
        if any(o < 0 or n < 0 or o + n > g for g, o, n in sizes):
            raise ValueError(f"{self} reaches outside its parameter")

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        return Box(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rectangles(self, start: int, stop: int) -> list[tuple[int, "Box"]]:
        """Cut the flat (row-major) range [start, stop) of this box into boxes.

        Returns (flat position inside this box, box) in order; for n dimensions there are at most 2n − 1 of them.
        """
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"flat range [{start}, {stop}) is outside a box of {self.numel} elements")
        if start == stop:
            return []
        if (start, stop) == (0, self.numel):
            return [(0, self)]
        row = prod(self.shape[1:])
        first_whole, last_whole = -(-start // row), stop // row
        pieces = []
        if first_whole > last_whole:  # inside one row
            return self._row(start // row, start, stop)
        if start % row:
            pieces += self._row(start // row, start, first_whole * row)
        if first_whole < last_whole:
            offset = (self.offset[0] + first_whole, *self.offset[1:])
            shape = (last_whole - first_whole, *self.shape[1:])
            pieces.append((first_whole * row, Box(self.global_shape, offset, shape)))
        if stop % row:
            pieces += self._row(last_whole, last_whole * row, stop)
        return pieces

    def _row(self, index: int, start: int, stop: int) -> list[tuple[int, "Box"]]:
        """The part [start, stop) of row `index`, cut in the remaining dimensions."""
        base = index * prod(self.shape[1:])
        inner = Box(self.global_shape[1:], self.offset[1:], self.shape[1:])
        lead = self.offset[0] + index
        return [
            (base + flat, Box(self.global_shape, (lead, *box.offset), (1, *box.shape)))
            for flat, box in inner.rectangles(start - base, stop - base)
        ]


@dataclass(frozen=True)
class Shard:
    """The flat range [start, stop) of a box of one parameter, and this rank's tensor that holds it.

    `name` is global: the same at every tensor, pipeline and data parallel layout. `values` is 1-D and contiguous with
    stop − start elements, a view of the owner's memory: reading sees the owner's current values, writing in place
    changes them. `replicas` are the ranks of this island that hold exactly this range of this parameter (None: only
    this rank does); every rank of that group holds an equal Shard, in the same order.
    """

    name: str
    box: Box
    start: int
    stop: int
    values: Tensor
    replicas: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.box.numel:
            raise ValueError(f"{self.name}: [{self.start}, {self.stop}) is outside its box of {self.box.numel}")
        if self.values.dim() != 1 or not self.values.is_contiguous() or self.values.numel() != self.numel:
            raise ValueError(
                f"{self.name}: expected a contiguous 1-D tensor of {self.numel} elements, got "
                f"{tuple(self.values.shape)} with strides {self.values.stride()}"
            )

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def narrow(self, start: int, stop: int, values: Tensor) -> "Shard":
        """The part [start, stop) (counted in the box), held in `values`, which no other rank of the island holds."""
        return Shard(self.name, self.box, start, stop, values)


def whole_shard(name: str, tensor: Tensor, replicas: ProcessGroup | None = None) -> Shard:
    """A Shard of a parameter that this rank holds entirely, as a view of `tensor` (which must be contiguous)."""
    with torch.no_grad():
        return Shard(name, Box.whole(tensor.shape), 0, tensor.numel(), tensor.detach().view(-1), replicas)
