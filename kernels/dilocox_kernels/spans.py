"""Spans: where the real elements of a flat range lie."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """The parts [start, stop) of a flat range of `numel` elements that hold tensors, in ascending order.

    What lies between them are gaps, which exist so that no block of a format crosses a tensor: every start is a
    multiple of the format's alignment. Gaps are never read nor written, except in `decode_accumulate`, which zeroes
    them. Raises ValueError for bounds that overlap or lie outside.
    """

    numel: int
    bounds: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.bounds:
            if not end <= start < stop <= self.numel:
                raise ValueError(
                    f"spans: [{start}, {stop}) is empty, overlaps the span before, or leaves a range of {self.numel}"
                )
            end = stop

    @staticmethod
    def whole(numel: int) -> "Spans":
        """One span without gaps."""
        return Spans(numel, ((0, numel),) if numel else ())

    @property
    def elements(self) -> int:
        """Without gaps."""
        return sum(stop - start for start, stop in self.bounds)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor [numel], one a span."""
        return [flat[start:stop] for start, stop in self.bounds]

    def within(self, start: int, stop: int) -> "Spans":
        """The range [start, stop) on its own."""
        cut = ((max(low, start) - start, min(high, stop) - start) for low, high in self.bounds)
        return Spans(stop - start, tuple((low, high) for low, high in cut if low < high))

    def pieces(self, start: int, stop: int, values: Sequence[Tensor]) -> list[Tensor]:
        """What of `values`, one tensor a span, lies in the range [start, stop); views, one a span of `within`."""
        cut = (
            tensor[max(start - low, 0) : stop - low]
            for (low, high), tensor in zip(self.bounds, values, strict=True)
            if low < stop and start < high
        )
        return list(cut)
