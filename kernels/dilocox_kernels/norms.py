"""Statistics of what is encoded, in a fixed order."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TREE_ELEMENTS = 1 << 16
"""Squares of so many elements are added up in a tree, the sums of trees one after the other."""


class Norms(NamedTuple):
    """Statistics taken in the same pass as the encoding; equal at any number of threads."""

    sum_of_squares: float
    """Of Δ alone, without what earlier rounds failed to send."""
    max_abs: float
    """Of what was to be sent, Δ + decay · residual."""
    finite: bool
    """False when that had a NaN or infinity; the bytes written then mean nothing and must not be used."""


class RunningNorms:
    """Norms of a range that comes in chunks of whole trees (but for the last), in float64."""

    def __init__(self) -> None:
        self._sum_of_squares = 0.0
        self._max_abs = 0.0

    def include(self, delta: Tensor, values: Tensor) -> bool:
        """Take in a chunk of Δ and of Δ + decay · residual, fp32 [n], n ≥ 1; False if the latter is not finite."""
        largest = values.abs().amax().item()
        if not math.isfinite(largest):
            self._sum_of_squares, self._max_abs = math.nan, largest
            return False
        self._max_abs = max(self._max_abs, largest)
        for tree in _sums_of_squares(delta):
            self._sum_of_squares += tree
        return True

    def result(self) -> Norms:
        return Norms(self._sum_of_squares, self._max_abs, math.isfinite(self._max_abs))


def _sums_of_squares(values: Tensor) -> list[float]:
    """Of each tree: halves added element by element, since torch.sum picks its order by threads and vector width."""
    width = min(TREE_ELEMENTS, 1 << (values.numel() - 1).bit_length())
    trees = -(-values.numel() // width)
    flat = torch.zeros(trees * width, dtype=torch.float64, device=values.device)
    flat[: values.numel()] = values
    sums = flat.mul_(flat).view(trees, width)
    while width > 1:
        width //= 2
        sums = sums[:, :width] + sums[:, width:]
    return sums.view(-1).tolist()
