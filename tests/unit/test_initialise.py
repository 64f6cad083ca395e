"""Initial weights depend on seed and global name alone, not on how a parameter is cut over ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox.islands import initialise as module
from dilocox.islands.initialise import initialise
from dilocox.shards import Box, Shard
from tests.distributed.islands import MODEL

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"


def filled(name: str, box: Box, start: int, stop: int, seed: int = 1) -> Tensor:
    values = torch.full((stop - start,), torch.nan)
    initialise([Shard(name, box, start, stop, values)], MODEL, seed)
    return values


def whole(name: str, *shape: int, seed: int = 1) -> Tensor:
    box = Box.whole(shape)
    return filled(name, box, 0, box.numel, seed).view(shape)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Box, int, int]:
    """A box inside a parameter of two or three dimensions, and a flat range of it."""
    shape = draw(st.sampled_from([(24, 10), (7, 33), (2, 9, 8), (1, 5)]))
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    inside = tuple(draw(st.integers(1, size - first)) for size, first in zip(shape, offset, strict=True))
    box = Box(shape, offset, inside)
    start = draw(st.integers(0, box.numel - 1))
    return box, start, draw(st.integers(start + 1, box.numel))


@pytest.fixture(scope="module", params=[1 << 22, 40], ids=["one block", "many blocks"])
def block(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@given(cut=cuts(), name=st.sampled_from([QKV, PROJ, "decoder.layers.3.mlp.linear_fc1.weight"]))
def test_a_part_holds_the_values_of_the_whole(block: int, cut: tuple[Box, int, int], name: str) -> None:
    box, start, stop = cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        index = tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))
        expected = whole(name, *box.global_shape)[index].flatten()[start:stop]
        assert torch.equal(filled(name, box, start, stop), expected)


def test_rows_of_different_blocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)
    rows = whole(QKV, 32, 16)
    assert len({tuple(row.tolist()) for row in rows}) == 32


def test_names_and_seeds_give_different_values() -> None:
    one = whole(QKV, 16, 16)
    assert not torch.equal(one, whole(QKV.replace("0", "1"), 16, 16))
    assert not torch.equal(one, whole(QKV, 16, 16, seed=2))
    assert torch.equal(one, whole(QKV, 16, 16))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        (QKV, 1.0),
        ("embedding.word_embeddings.weight", 1.0),
        (PROJ, 8**-0.5),
        ("decoder.layers.2.mlp.linear_fc2.weight", 8**-0.5),
    ],
)
def test_spread(name: str, share: float) -> None:
    """Four layers: what ends a residual branch is smaller by √(2 · 4)."""
    weights = whole(name, 300, 200)
    assert weights.std().item() == pytest.approx(MODEL.init_std * share, rel=0.02)
    assert abs(weights.mean().item()) < 0.02 * MODEL.init_std


@pytest.mark.parametrize("name", ["decoder.layers.0.input_layernorm.weight", "decoder.final_layernorm.weight"])
def test_norms_are_one(name: str) -> None:
    assert torch.equal(whole(name, 12), torch.ones(12))
