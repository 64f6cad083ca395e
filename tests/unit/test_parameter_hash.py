"""The parameter hash: the same for the same bits, however they are cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.outer.island_group import IslandGroup
from dilocox.parameter_hash import parameter_hash
from dilocox.shards import Box, Shard, whole_shard

GROUP = IslandGroup(None, torch.device("cpu"))


def whole(**tensors: torch.Tensor) -> str:
    return parameter_hash([whole_shard(name, tensor) for name, tensor in tensors.items()], GROUP)


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_any_cut_into_boxes_and_ranges_gives_the_hash_of_the_whole(data: st.DataObject, shape: list[int]) -> None:
    tensor = torch.randn(shape)
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dimension]))
    shards = []
    for low, high in ((0, cut), (cut, shape[dimension])):
        part = tensor.narrow(dimension, low, high - low).contiguous()
        offset = [low if index == dimension else 0 for index in range(len(shape))]
        box = Box(tuple(shape), tuple(offset), tuple(part.shape))
        middle = data.draw(st.integers(0, box.numel))
        flat = part.view(-1)
        shards += [Shard("w", box, 0, middle, flat[:middle]), Shard("w", box, middle, box.numel, flat[middle:])]
    assert parameter_hash(shards, GROUP) == whole(w=tensor)


def test_every_bit_position_and_name_counts() -> None:
    tensor = torch.arange(6.0)
    changed = tensor.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    hashes = [
        whole(a=tensor),
        whole(b=tensor),
        whole(a=changed),
        whole(a=tensor.flip(0)),
        whole(a=tensor, b=changed),
        whole(a=changed, b=tensor),
    ]
    assert len(set(hashes)) == len(hashes)
