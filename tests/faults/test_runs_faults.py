"""Runs that are killed, spoiled or started wrongly: nothing is lost, and the message says what to do."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from dilocox.launchers.rendezvous import serve_store
from tests.runs import TINY, Outcome, checkpointed, cli, command, corpus, outcome, train_in_one_process, wait_until


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return corpus(tmp_path / "corpus")


def settings(tmp_path: Path, name: str, *overrides: str) -> list[str]:
    return [
        "island=single",
        *TINY,
        f"runs_dir={tmp_path}",
        f"name={name}",
        "steps=12",
        "schedule.inner_steps=2",
        "checkpoint.every_steps=2",
        "participation.timeout_s=60",
        *overrides,
    ]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def assert_same(resumed: Outcome, unbroken: Outcome) -> None:
    assert resumed.hashes == unbroken.hashes
    for island in range(2):
        assert resumed.losses(island) == unbroken.losses(island)
    assert resumed.heldout == unbroken.heldout


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["island=single"], ["island=tp2"]])
def test_a_run_killed_and_resumed_equals_an_unbroken_one(tmp_path: Path, data: list[str], layout: list[str]) -> None:
    common = [*data, *layout, *TINY]
    unbroken = cli("train", *settings(tmp_path, "unbroken", *common))
    assert unbroken.returncode == 0, unbroken.stderr
    process = start("train", *settings(tmp_path, "killed", *common))
    wait_until(checkpointed(tmp_path / "killed", 4, 2), "a checkpoint of step 4", process)
    time.sleep(random.random() / 2)  # anywhere in a round, an exchange or a save
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    for _ in range(2):  # resuming a finished run does nothing, and says so
        resumed = cli("train", *settings(tmp_path, "killed", *common, "resume=auto"))
        assert resumed.returncode == 0, resumed.stderr
        assert_same(outcome(tmp_path / "killed"), outcome(tmp_path / "unbroken"))


@pytest.mark.slow
def test_an_island_killed_ends_the_run_and_a_resume_finishes_it(tmp_path: Path, data: list[str]) -> None:
    process = start("train", *settings(tmp_path, "killed", *data))
    wait_until(checkpointed(tmp_path / "killed", 4, 2), "a checkpoint of step 4", process)
    ranks = [child for child in psutil.Process(process.pid).children() if "island" in child.cmdline()]
    victim = next(rank for rank in ranks if rank.cmdline()[rank.cmdline().index("--island") + 1] == "1")
    victim.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert "island1-rank0 was killed by SIGKILL" in output
    resumed = cli("train", *settings(tmp_path, "killed", *data, "resume=auto"))
    assert resumed.returncode == 0, resumed.stderr
    [unbroken] = train_in_one_process([settings(tmp_path, "unbroken", *data)])
    assert_same(outcome(tmp_path / "killed"), unbroken)


@pytest.mark.slow
def test_resume_takes_the_newest_round_that_all_islands_hold_whole(tmp_path: Path, data: list[str]) -> None:
    common = [*data, "launcher=inprocess", "checkpoint.keep_last=4"]
    [unbroken] = train_in_one_process([settings(tmp_path, "run", *common)])
    folder = tmp_path / "run" / "checkpoints"
    newest = folder / "island0" / "step-00000012"
    damaged = next(newest.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (folder / "island1" / "step-00000010").rename(folder / "island1" / "gone")
    (tmp_path / "empty").mkdir()
    for place, expected in {"nothing": "no such folder", "empty": "no round that all 2 islands hold"}.items():
        refused = cli("train", *settings(tmp_path, f"from-{place}", *common, f"resume={tmp_path / place}"))
        assert refused.returncode == 1
        assert expected in refused.stderr
    resumed = cli("train", *settings(tmp_path, "run", *common, "resume=auto"))
    assert resumed.returncode == 0, resumed.stderr
    log = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "not resuming from step 12" in log
    assert damaged.name in log
    assert "step-00000008" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert_same(outcome(tmp_path / "run"), unbroken)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, data: list[str]) -> None:
    train_in_one_process([settings(tmp_path, "run", *data, "steps=2")])
    for change, field in {
        "model.hidden_size=64": "model.hidden_size",
        "codec=int8": "codec.format",
        "seed=7": "seed",
        "data.heldout_fraction=0.3": "corpus",
    }.items():
        resume = [f"resume={tmp_path / 'run'}", "launcher=inprocess"]
        refused = cli("train", *settings(tmp_path, f"other-{field}", *data, *resume, change))
        assert refused.returncode == 1
        assert field in refused.stderr
        assert "was saved with" in refused.stderr
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    refused = cli("train", *settings(tmp_path, "run", *data, "resume=auto", "launcher=inprocess", "model.layers=3"))
    assert refused.returncode == 1
    assert kept == {name: (tmp_path / "run" / name).read_bytes() for name in kept}


def test_a_second_run_into_a_folder_is_refused_and_changes_nothing(tmp_path: Path, data: list[str]) -> None:
    train_in_one_process([settings(tmp_path, "run", *data, "steps=2")])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    refused = cli("train", *settings(tmp_path, "run", *data))
    assert refused.returncode == 1
    assert "already holds a run" in refused.stderr
    assert "resume=auto" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


EXPLODING = ("inner.lr=1e38", "inner.warmup_steps=0", "inner.weight_decay=1000")
"""The first update makes weights infinite."""


def test_a_run_that_failed_before_it_began_can_be_started_again(tmp_path: Path, data: list[str]) -> None:
    document = tmp_path / "corpus" / "0.txt"
    text = document.read_text()
    document.write_bytes(b"\xff\xfe\x00")
    common = settings(tmp_path, "run", *data, "steps=2", "launcher=inprocess")
    failed = cli("train", *common)
    assert failed.returncode == 1
    assert "0.txt" in failed.stderr
    document.write_text(text)
    again = cli("train", *common)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], r"island 0, inner step 2: the loss is (nan|inf)"),
        (
            ["schedule.inner_steps=1"],
            r"island 0, inner step 1, fragment all: the pseudo-gradient has a NaN or infinity, first in \S+weight",
        ),
    ],
)
def test_a_nan_ends_the_run_and_names_its_place(
    tmp_path: Path, data: list[str], overrides: list[str], expected: str
) -> None:
    run = cli("train", *settings(tmp_path, "run", *data, "launcher=inprocess", *EXPLODING, *overrides))
    assert run.returncode == 1
    assert re.search(expected, run.stderr), run.stderr
    assert "Traceback" not in run.stderr
    assert not list((tmp_path / "run").glob("checkpoints/*/step-*"))


@pytest.mark.slow
def test_islands_with_different_settings_refuse_each_other_on_both_sides(tmp_path: Path, data: list[str]) -> None:
    store = serve_store(0, loopback_only=True)
    outputs = []
    processes = [
        start(
            *("island", "--island", str(island), "--islands", "2", "--rendezvous", f"127.0.0.1:{store.port}"),
            *settings(tmp_path, "run", *data, f"inner.lr={lr}"),
        )
        for island, lr in enumerate(("0.001", "0.002"))
    ]
    for process in processes:
        outputs.append(process.communicate(timeout=200)[0])
        assert process.returncode == 1
    for output in outputs:
        assert "inner.lr differs" in output
        assert "0.001" in output
        assert "0.002" in output


@pytest.mark.slow
def test_islands_started_one_by_one_meet_at_a_coordinator(tmp_path: Path, data: list[str]) -> None:
    coordinator = start("coordinator", "--port", "0")
    assert coordinator.stdout is not None
    port = coordinator.stdout.readline().split(";")[0].rpartition(":")[2]
    processes = [
        start(
            *("island", "--island", str(island), "--islands", "2", "--rendezvous", f"127.0.0.1:{port}"),
            *settings(tmp_path, "run", *data, "steps=4"),
        )
        for island in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("held-out loss" in output for output in outputs)
    assert (tmp_path / "run" / "summary.json").exists()
    coordinator.send_signal(signal.SIGINT)
    coordinator.communicate(timeout=30)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        run = cli("coordinator", "--port", str(port))
    assert run.returncode == 1
    assert f"port={port}" in run.stderr


def test_wrong_settings_end_before_anything_starts(tmp_path: Path) -> None:
    for override, expected in {
        "model.layer=3": "Did you mean model.layers?",
        "steps=13": "schedule.inner_steps=2",
        "codec.block_size=48": "power of two",
        "island.tp=3": "island.tp",
        "outer_optimizer=none": "the anchor would never move",
    }.items():
        run = cli("train", *settings(tmp_path, "run"), "codec=int4", override)
        assert run.returncode == 1, override
        assert expected in run.stderr, run.stderr
        assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()
