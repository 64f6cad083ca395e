"""Checkpoints under fire: killed savers, full disks, flipped bits. A listed one loads, or the error names the file."""

import multiprocessing as mp
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox import checkpoint
from dilocox.errors import CheckpointError
from dilocox.shards import Shard, whole_shard

children = mp.get_context("forkserver")
children.set_forkserver_preload(["dilocox.checkpoint", __name__])


def shards(value: float, numel: int = 1000) -> dict[str, list[Shard]]:
    return {"weights": [whole_shard("w", torch.full((numel,), value)), whole_shard("b", torch.full((3,), value))]}


def save(folder: Path, step: int, numel: int = 1000) -> Path:
    return checkpoint.save(
        folder,
        step=step,
        shards=shards(step, numel),
        rank_tensors={"stream": torch.arange(step)},
        state={"step": step},
        about={"island": 0},
        group=None,
        keep_last=2,
    )


def check_all_load(folder: Path, numel: int = 1000) -> list[int]:
    """The listed steps, each of which was loaded and holds what was saved."""
    steps = checkpoint.rounds(folder)
    for step in steps:
        loaded = shards(-1, numel)
        state, tensors = checkpoint.load(
            checkpoint.step_folder(folder, step), shards=loaded, group=None, expected={"island": 0}
        )
        assert state == {"step": step}
        assert torch.equal(tensors["stream"], torch.arange(step))
        assert all(bool((shard.values == step).all()) for shard in loaded["weights"])
    return steps


def exit_code(function: Callable[..., None], *args: Any) -> int | None:
    process = children.Process(target=function, args=args, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def save_and_die(folder: Path, step: int, operation: int) -> None:
    """Save, and end by SIGKILL just before the given operation on files (the first is 0)."""
    operations = count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        opens = event == "open" and str(args[0]).startswith(str(folder))
        if (opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")) and next(operations) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(folder, step)


@pytest.mark.parametrize(("step", "kept"), [(30, {20}), (20, {10})], ids=["a new step", "a step that exists"])
def test_a_saver_killed_before_any_file_operation_leaves_whole_checkpoints(
    tmp_path: Path, step: int, kept: set[int]
) -> None:
    for operation in count():
        folder = tmp_path / str(operation)
        save(folder, 10)
        save(folder, 20)
        code = exit_code(save_and_die, folder, step, operation)
        steps = set(check_all_load(folder))
        assert kept <= steps, f"killed before operation {operation}"
        save(folder, 40)
        assert not list(folder.glob("*.partial"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert operation > 10, "too few operations were seen to have meant anything"
    assert steps == {*kept, step}


def save_without_end(folder: Path, numel: int) -> None:
    for step in count(1):
        save(folder, step, numel)


def test_a_saver_killed_at_random_moments_leaves_whole_checkpoints(tmp_path: Path) -> None:
    moments, numel = random.Random(5), 300_000
    for trial in range(8):
        folder = tmp_path / str(trial)
        process = children.Process(target=save_without_end, args=(folder, numel), daemon=True)
        process.start()
        while len(checkpoint.rounds(folder)) < 2:
            time.sleep(0.005)
        before = max(checkpoint.rounds(folder))
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()
        steps = check_all_load(folder, numel)
        assert len(steps) >= 2
        assert max(steps) >= before


def save_on_full_disk(folder: Path, limit_bytes: int, answer: Any) -> None:
    """Save where no file may grow beyond a limit, which the system answers as it answers a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        save(folder, 30)
    except CheckpointError as error:
        answer.send(str(error))
    answer.close()


@pytest.mark.parametrize("limit_bytes", [0, 20, 700, 3000])
def test_a_full_disk_is_a_clear_error_and_older_checkpoints_stay(tmp_path: Path, limit_bytes: int) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    here, there = children.Pipe(duplex=False)
    assert exit_code(save_on_full_disk, tmp_path, limit_bytes, there) == 0
    assert here.poll(), "the save went through"
    message = here.recv()
    assert "File too large" in message
    assert str(tmp_path / "step-00000030.partial") in message
    assert check_all_load(tmp_path) == [10, 20]
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_in_the_way_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "island0").write_text("mine")
    with pytest.raises(CheckpointError, match="island0"):
        save(tmp_path / "island0", 10)
    assert (tmp_path / "island0").read_text() == "mine"
    (tmp_path / "step-00000010").write_text("mine")
    with pytest.raises(CheckpointError, match="step-00000010 is in the way"):
        save(tmp_path, 10)
    assert (tmp_path / "step-00000010").read_text() == "mine"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("island0"), 10)


FILES = ("manifest.json", ".metadata", "__0_0.distcp", "rank-00000.json", "rank-00000.pt")


def assert_refused(path: Path, named: str) -> None:
    untouched = shards(7)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, shards=untouched, group=None, expected={})
    assert str(path / named) in str(caught.value) or (named == "manifest.json" and str(path) in str(caught.value))
    assert all(bool((shard.values == 7).all()) for shard in untouched["weights"])
    with pytest.raises(CheckpointError):
        checkpoint.verify(path)


def test_the_files_are_those_that_the_tests_damage(saved: Path) -> None:
    assert sorted(file.name for file in saved.iterdir()) == sorted(FILES)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(saved: Path, name: str, place: float, bit: int) -> None:
    file = saved / name
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= 1 << bit
    file.write_bytes(damaged)
    try:
        assert_refused(saved, name)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_short_longer_or_gone_is_named(saved: Path, name: str) -> None:
    file = saved / name
    content = file.read_bytes()
    try:
        for wrong in (b"", content[: len(content) // 2], content[:-1], content + b"\n"):
            file.write_bytes(wrong)
            assert_refused(saved, name)
        file.unlink()
        assert_refused(saved, name)
    finally:
        file.write_bytes(content)
    checkpoint.verify(saved)


def test_a_damaged_manifest_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    (newest / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-00000020/manifest\.json is damaged.*delete"):
        checkpoint.rounds(tmp_path)


def test_a_format_of_the_future_is_refused_by_its_number(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / "manifest.json").write_text('{"format": 2, "something": "new"}')
    with pytest.raises(CheckpointError, match="has format 2, this version of dilocox reads format 1"):
        checkpoint.verify(path)
