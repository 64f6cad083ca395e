"""Boxes cut into rectangles, and shards as views of their owner's memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.shards import Box, Shard, whole_shard


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Box, int, int]:
    """A box of up to four dimensions inside a parameter, and a flat range of it."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    offset = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    shape = tuple(draw(st.integers(1, size - first)) for size, first in zip(sizes, offset, strict=True))
    box = Box(tuple(sizes), offset, shape)
    start = draw(st.integers(0, box.numel))
    return box, start, draw(st.integers(start, box.numel))


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))


@given(ranges())
def test_rectangles_hold_the_range_in_order(cut: tuple[Box, int, int]) -> None:
    box, start, stop = cut
    numbers = torch.arange(torch.Size(box.global_shape).numel()).view(box.global_shape)
    expected = numbers[index(box)].flatten()[start:stop]
    position = start
    found = []
    pieces = box.rectangles(start, stop)
    for flat, piece in pieces:
        assert flat == position
        position += piece.numel
        found.append(numbers[index(piece)].flatten())
    assert position == stop
    assert torch.equal(torch.cat([*found, expected[:0]]), expected)
    assert len(pieces) <= max(1, 2 * len(box.shape) - 1)


def test_a_range_outside_the_box_is_refused() -> None:
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="outside a box of 6"):
            Box.whole((2, 3)).rectangles(start, stop)


def test_a_box_outside_its_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="reaches outside"):
        Box((4, 4), (0, 3), (4, 2))


def test_a_shard_sees_and_changes_its_owner() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    shard = whole_shard("w", weight)
    shard.values.copy_(torch.arange(6.0))
    assert weight.detach().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert shard.numel == 6
    assert not shard.values.requires_grad


def test_a_part_of_a_shard_keeps_its_name_and_box() -> None:
    shard = whole_shard("w", torch.arange(6.0).view(2, 3))
    part = shard.narrow(1, 4, shard.values[1:4])
    assert (part.name, part.box, part.start, part.stop, part.replicas) == ("w", shard.box, 1, 4, None)


@pytest.mark.parametrize(
    "values", [torch.zeros(5), torch.zeros(2, 3), torch.zeros(12)[::2]], ids=["short", "2-D", "strided"]
)
def test_values_must_be_flat_contiguous_and_as_long_as_the_range(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous 1-D tensor of 6"):
        Shard("w", Box.whole((2, 3)), 0, 6, values)


def test_a_range_outside_the_shards_box_is_refused() -> None:
    with pytest.raises(ValueError, match="outside its box of 6"):
        Shard("w", Box.whole((2, 3)), 2, 7, torch.zeros(5))
