"""Fragments: every element has one owner, blocks cross no tensor, flat buffers and tensors agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.outer.fragments import Fragment, _cut, flat_values
from dilocox.shards import Shard, whole_shard

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=12)
ALIGNMENT = st.sampled_from([1, 32, 64])


@given(SIZES, st.integers(1, 9), ALIGNMENT)
def test_owners_cover_every_element_once_and_evenly(sizes: list[int], parts: int, alignment: int) -> None:
    covered = [torch.zeros(size) for size in sizes]
    blocks = [0] * parts
    for part, index, start, stop in _cut(sizes, parts, alignment):
        assert start % alignment == 0
        assert stop % alignment == 0 or stop == sizes[index]
        covered[index][start:stop] += 1
        blocks[part] += -(-(stop - start) // alignment)
    assert all(bool((tensor == 1).all()) for tensor in covered)
    assert max(blocks) - min(blocks) <= 1


@given(SIZES, ALIGNMENT, st.integers(1, 500))
def test_flat_ranges_collect_every_tensor_with_gaps_of_zeros(sizes: list[int], alignment: int, chunk: int) -> None:
    tensors = [torch.arange(1.0, size + 1) for size in sizes]
    fragment = Fragment("all", [whole_shard(f"p{i}", tensor) for i, tensor in enumerate(tensors)], alignment)
    assert fragment.owned == sum(sizes)
    flat = torch.full((fragment.numel,), -1.0)
    for start, stop in fragment.ranges(chunk):
        assert start % alignment == 0
        fragment.read(tensors, start, stop, flat[start:stop])
    for piece in fragment.pieces:
        assert piece.offset % alignment == 0
        torch.testing.assert_close(flat[piece.offset :][: piece.stop - piece.start], tensors[piece.index])
    assert flat.count_nonzero() == sum(sizes)


@given(SIZES, ALIGNMENT, st.data())
def test_owned_shards_name_any_part_of_a_flat_buffer(sizes: list[int], alignment: int, data: st.DataObject) -> None:
    tensors = [torch.rand(size) for size in sizes]
    fragment = Fragment("all", [whole_shard(f"p{i}", tensor) for i, tensor in enumerate(tensors)], alignment)
    flat = torch.zeros(fragment.numel)
    fragment.read(tensors, 0, fragment.numel, flat)
    start = data.draw(st.integers(0, fragment.numel))
    stop = data.draw(st.integers(start, fragment.numel))
    for shard in fragment.owned_shards(flat[start:stop], start):
        assert torch.equal(shard.values, tensors[int(shard.name[1:])][shard.start : shard.stop])
    named = sum(shard.numel for shard in fragment.owned_shards(flat[start:stop], start))
    assert named == sum(slice_.stop - slice_.start for _, slice_, _ in fragment.overlaps(start, stop))


def test_shards_are_views_of_the_weights_they_name() -> None:
    weights = torch.zeros(3, 4)
    shard = whole_shard("w", weights)
    shard.values[5] = 7
    assert weights[1, 1] == 7
    with pytest.raises(ValueError, match="w: expected a contiguous 1-D tensor of 12 elements"):
        Shard("w", shard.box, 0, 12, torch.zeros(11))
    assert flat_values([shard])[0].data_ptr() == weights.data_ptr()
