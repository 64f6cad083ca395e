"""Checkpoints of an island of one rank: every bit comes back, into any cut, and what does not fit is refused."""

import random
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox import checkpoint
from dilocox.errors import CheckpointError
from dilocox.shards import Box, Shard, whole_shard

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern may come, NaNs and infinities with it."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(tuple(shape))


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def random_cut(name: str, full: Tensor, cuts: random.Random) -> list[Shard]:
    """A tensor as boxes of a grid with random lines, each box as random flat ranges in memory of their own."""
    lines = [sorted({0, size, *(cuts.randint(0, size) for _ in range(cuts.randint(0, 2)))}) for size in full.shape]
    shards = []
    for bounds in product(*map(pairwise, lines)):
        box = Box(tuple(full.shape), tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
        values = full[tuple(slice(low, high) for low, high in bounds)].reshape(-1)
        points = sorted({0, box.numel, *(cuts.randint(0, box.numel) for _ in range(cuts.randint(0, 2)))})
        for start, stop in pairwise(points):
            shards.append(Shard(name, box, start, stop, values[start:stop].clone()))
    return shards


def assemble(shards: Sequence[Shard], like: Tensor) -> Tensor:
    full = torch.zeros_like(like)
    for shard in shards:
        for start, box in shard.box.rectangles(shard.start, shard.stop):
            index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            full[index] = shard.values[start - shard.start :][: box.numel].view(box.shape)
    return full


def save(folder: Path, step: int, shards: dict[str, list[Shard]], keep_last: int = 2, **about: object) -> Path:
    return checkpoint.save(
        folder,
        step=step,
        shards=shards,
        rank_tensors={"cpu": torch.get_rng_state()},
        state={"step": step, "loss": 0.1},
        about=about,
        group=None,
        keep_last=keep_last,
    )


def weights(step: int = 0, **shapes: tuple[int, ...]) -> dict[str, list[Shard]]:
    shapes = shapes or {"embedding": (5, 4), "norm": (4,)}
    return {"weights": [whole_shard(name, torch.full(shape, float(step))) for name, shape in shapes.items()]}


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_every_bit_comes_back_into_any_other_cut(shapes: list[list[int]], dtype: torch.dtype, seed: int) -> None:
    cuts = random.Random(seed)
    full = {f"layers.{i}.weight": random_bits(shape, dtype, seed + i) for i, shape in enumerate(shapes)}
    kinds = ("weights", "anchor")
    saved = {kind: [s for name, t in full.items() for s in random_cut(name, t, cuts)] for kind in kinds}
    empty = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    loaded = {kind: [s for name, t in empty.items() for s in random_cut(name, t, cuts)] for kind in kinds}
    with TemporaryDirectory() as folder:
        path = save(Path(folder), 1, saved)
        checkpoint.load(path, shards=loaded, group=None, expected={})
    for kind in kinds:
        for name, tensor in full.items():
            back = assemble([shard for shard in loaded[kind] if shard.name == name], tensor)
            assert equal_bits(back, tensor), f"{kind}/{name}"


def test_state_and_rank_tensors_come_back(tmp_path: Path) -> None:
    torch.manual_seed(7)
    tensors = {"cpu": torch.get_rng_state(), "buffer": torch.randn(9).to(torch.bfloat16)[2:5], "empty": torch.empty(0)}
    state = {"inner_steps": 12, "loss": 0.1 + 0.2, "position": {"epoch": 1, "documents": [3, 4]}, "best": None}
    path = checkpoint.save(
        tmp_path,
        step=12,
        shards=weights(),
        rank_tensors=tensors,
        state=state,
        about={"round": 3},
        group=None,
        keep_last=2,
    )
    back, back_tensors = checkpoint.load(path, shards=weights(), group=None, expected={"round": 3})
    assert back == state
    assert back_tensors.keys() == tensors.keys()
    assert all(equal_bits(back_tensors[name], tensors[name]) for name in tensors)


def test_saving_changes_no_weight_and_draws_no_random_number(tmp_path: Path) -> None:
    shards = {"weights": [whole_shard("w", random_bits((4, 4), torch.float32, 3))]}
    before, generator = shards["weights"][0].values.clone(), torch.get_rng_state()
    save(tmp_path, 1, shards)
    assert equal_bits(shards["weights"][0].values, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_empty_shard_and_an_empty_kind_are_no_trouble(tmp_path: Path) -> None:
    box = Box.whole((4,))
    nothing = Shard("w", box, 2, 2, torch.empty(0))
    everything = Shard("w", box, 0, 4, torch.arange(4.0))
    path = save(tmp_path, 1, {"weights": [nothing, everything], "residual_0": []})
    target = Shard("w", box, 0, 4, torch.zeros(4))
    checkpoint.load(path, shards={"weights": [target, nothing]}, group=None, expected={})
    assert target.values.tolist() == [0, 1, 2, 3]


def test_the_newest_are_kept_and_listed(tmp_path: Path) -> None:
    assert checkpoint.rounds(tmp_path / "none") == []
    for step in (5, 10, 15, 20):
        assert save(tmp_path, step, weights(step), keep_last=2) == checkpoint.step_folder(tmp_path, step)
    assert checkpoint.rounds(tmp_path) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_a_save_after_going_back_replaces_its_step_and_removes_the_abandoned_future(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, weights(step), keep_last=3)
    save(tmp_path, 20, weights(99), keep_last=3)
    assert checkpoint.rounds(tmp_path) == [10, 20]
    shards = weights()
    checkpoint.load(checkpoint.step_folder(tmp_path, 20), shards=shards, group=None, expected={})
    assert all(bool((shard.values == 99).all()) for shard in shards["weights"])


def test_what_a_save_left_behind_is_not_listed_and_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 10, weights())
    leftover = tmp_path / "step-00000020.partial"
    leftover.mkdir()
    (leftover / "manifest.json").write_text("{}")
    assert checkpoint.rounds(tmp_path) == [10]
    save(tmp_path, 30, weights())
    assert not leftover.exists()


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=4))
def test_newest_common_is_held_by_all_and_nothing_newer_is(held: list[set[int]]) -> None:
    newest = checkpoint.newest_common([sorted(steps) for steps in held])
    common = [step for step in range(7) if all(step in steps for steps in held)]
    assert newest == (common[-1] if common else None)


def test_the_manifest_says_what_it_is(tmp_path: Path) -> None:
    path = save(tmp_path, 4, weights(embedding=(5, 4)), round=2, layout={"tp": 1})
    manifest = checkpoint.verify(path)
    assert (manifest.step, manifest.ranks, manifest.about) == (4, 1, {"round": 2, "layout": {"tp": 1}})
    assert manifest.tensors == {"weights/embedding": {"shape": [5, 4], "dtype": "float32"}}
    assert set(manifest.files) == {file.name for file in path.iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (weights(embedding=(5, 4), norm=(5,)), r"weights/norm is float32\[4\].*float32\[5\]"),
        (weights(embedding=(5, 4)), r"weights/norm is float32\[4\] in the checkpoint and absent"),
        (weights(bias=(4,), embedding=(5, 4), norm=(4,)), r"weights/bias is absent in the checkpoint"),
        (weights() | {"residual_0": weights()["weights"]}, r"residual_0/embedding is absent in the checkpoint"),
        ({}, r"weights/embedding is float32\[5, 4\] in the checkpoint and absent"),
        ({"weights": [whole_shard("embedding", torch.zeros(5, 4).bfloat16())]}, r"weights/embedding.*bfloat16"),
    ],
)
def test_another_model_is_refused_and_left_as_it_is(tmp_path: Path, other: dict[str, list[Shard]], named: str) -> None:
    path = save(tmp_path, 1, weights(7))
    with pytest.raises(CheckpointError, match=named):
        checkpoint.load(path, shards=other, group=None, expected={})
    assert all(not shard.values.any() for shards in other.values() for shard in shards)


def test_an_unexpected_field_is_named_with_both_values(tmp_path: Path) -> None:
    path = save(tmp_path, 1, weights(), island=0, layout={"tp": 2})
    with pytest.raises(CheckpointError, match=r"island=0, this run has 1"):
        checkpoint.load(path, shards=weights(), group=None, expected={"layout": {"tp": 2}, "island": 1})
    with pytest.raises(CheckpointError, match=r"layout=\{'tp': 2\}, this run has \{'tp': 1\}"):
        checkpoint.load(path, shards=weights(), group=None, expected={"layout": {"tp": 1}})


def test_load_tensors_takes_the_asked_kinds_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 1, weights(3) | {"anchor": weights(4)["weights"]}, round=1)
    shards = {"anchor": weights()["weights"]}
    assert checkpoint.load_tensors(path, shards=shards, group=None).about == {"round": 1}
    assert all(bool((shard.values == 4).all()) for shard in shards["anchor"])


def test_a_checkpoint_with_a_gap_is_refused(tmp_path: Path) -> None:
    half = Shard("w", Box.whole((4,)), 0, 2, torch.ones(2))
    path = save(tmp_path, 1, {"weights": [half]})
    with pytest.raises(CheckpointError, match="2 of the 4 elements of weights/w"):
        checkpoint.load(path, shards=weights(w=(4,)), group=None, expected={})


def test_shards_that_overlap_are_not_saved(tmp_path: Path) -> None:
    box = Box.whole((4,))
    shards = [Shard("w", box, 0, 3, torch.ones(3)), Shard("w", box, 2, 4, torch.ones(2))]
    with pytest.raises(CheckpointError, match="overlapping"):
        save(tmp_path, 1, {"weights": shards})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_no_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save(
            tmp_path,
            step=1,
            shards=weights(),
            rank_tensors={},
            state={"path": tmp_path},
            about={},
            group=None,
            keep_last=2,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        checkpoint.load(tmp_path / "step-00000001", shards=weights(), group=None, expected={})
