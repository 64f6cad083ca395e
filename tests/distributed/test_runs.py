"""Whole runs: every preset, every launcher, and what methods promise about them."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dilocox.config import choices
from dilocox.launchers.rendezvous import serve_store
from dilocox.observe.schema import METRICS_FILE
from tests.runs import TINY, Outcome, cli, corpus, outcome, train_in_one_process


def settings(tmp_path: Path, name: str, *overrides: str) -> list[str]:
    return [*TINY, f"runs_dir={tmp_path}", f"name={name}", "steps=6", "schedule.inner_steps=3", *overrides]


def test_every_preset_trains_and_ends_with_equal_islands(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    presets = choices("algo")
    runs = []
    for preset in presets:
        rounds = [] if preset == "sync_dp" else ["schedule.inner_steps=3"]
        place = [f"runs_dir={tmp_path}", f"name={preset}"]
        runs.append([f"algo={preset}", "island=single", *TINY, *data, *place, "steps=6", *rounds])
    for preset, run in zip(presets, train_in_one_process(runs), strict=True):
        assert len(set(run.hashes)) == 1, preset
        assert run.heldout[6] < run.heldout[0], preset
        assert len(run.syncs(0)) == (6 if preset == "sync_dp" else 2), preset


def test_codecs_and_exchanges_train_and_cost_what_they_should(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    bits = {"fp32": 32.0, "bf16": 16.0, "int8": 8.25, "int4": 4.25}
    runs = [
        settings(
            tmp_path, f"{codec}-{exchange}", *data, "island=single", *TINY, f"codec={codec}", f"exchange={exchange}"
        )
        for codec in bits
        for exchange in ("all_gather", "reduce_scatter")
    ]
    outcomes = train_in_one_process(runs)
    for (codec, expected), both in zip(bits.items(), zip(*[iter(outcomes)] * 2, strict=True), strict=True):
        for run in both:
            assert len(set(run.hashes)) == 1, codec
            for sync in run.syncs(0):  # two islands: both exchanges send one copy of the codes
                framing = sync.bits_per_parameter - expected
                assert 0 < framing < 0.3, (codec, framing)
    losses = [run.heldout[6] for run in outcomes]
    assert max(losses) - min(losses) < 0.02, losses


def equal(left: Outcome, right: Outcome) -> None:
    assert left.hashes == right.hashes
    assert len(set(left.hashes)) == 1
    for island in range(2):
        assert left.losses(island) == right.losses(island)
        assert [s.checksum for s in left.syncs(island)] == [s.checksum for s in right.syncs(island)]
    assert left.heldout == right.heldout


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2"])
def test_islands_as_processes_equal_islands_in_process(tmp_path: Path, layout: str) -> None:
    data = corpus(tmp_path / "corpus")
    for launcher in ("local", "inprocess"):
        run = cli(
            "train",
            f"island={layout}",
            *settings(tmp_path, launcher, *data, f"launcher={launcher}", "island.micro_batch_size=2"),
        )
        assert run.returncode == 0, run.stderr
    equal(outcome(tmp_path / "local"), outcome(tmp_path / "inprocess"))


def test_the_main_job_leaves_a_whole_folder(tmp_path: Path) -> None:
    """Two islands of two tensor-parallel ranks, as `make train` starts them, with W&B offline."""
    data = corpus(tmp_path / "corpus")
    run = cli("train", *settings(tmp_path, "main", *data, "observe.wandb=offline", "checkpoint.every_steps=3"))
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "main"
    assert (tmp_path / "latest").resolve() == folder.resolve()
    assert {"config.yaml", METRICS_FILE, "loss.png", "summary.json", "logs", "checkpoints", "wandb"} <= {
        path.name for path in folder.iterdir()
    }
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        f"island{island}-rank{rank}.log" for island in range(2) for rank in range(2)
    ]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["heldout_loss"] < summary["untrained_heldout_loss"]
    assert summary["rounds"] == 2
    assert summary["tokens"] == 6 * 2 * 4 * 32
    assert summary["parameters_equal"]
    assert summary["bytes_between_islands"] > 0
    assert summary["bytes_inside_islands"] > summary["bytes_between_islands"]
    assert "held-out loss" in run.stdout
    assert "tp=2" in run.stdout
    for island in range(2):
        steps = sorted(outcome(folder).losses(island))
        assert all(after == before + 1 for before, after in pairwise(steps))
        assert steps[-1] == 6


@pytest.mark.slow
def test_islands_under_torchrun_equal_those_of_the_launcher(tmp_path: Path) -> None:
    """Each island is a torchrun of its own with two tensor-parallel ranks; they meet at a store."""
    data = corpus(tmp_path / "corpus")
    store = serve_store(0, loopback_only=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dilocox.cli", "island"]
    place = ["--islands", "2", "--rendezvous", f"127.0.0.1:{store.port}", *settings(tmp_path, "torchrun", *data)]
    processes = [
        subprocess.Popen(
            [sys.executable, *torchrun, "--island", str(island), *place],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for island in range(2)
    ]
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("held-out loss" in output for output in outputs)
    run = cli("train", *settings(tmp_path, "launcher", *data))
    assert run.returncode == 0, run.stderr
    equal(outcome(tmp_path / "torchrun"), outcome(tmp_path / "launcher"))


@pytest.mark.slow
def test_outer_state_in_host_memory_changes_nothing(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    common = ["island=single", *TINY]
    same, host = train_in_one_process(
        [settings(tmp_path, place, *data, *common, f"outer_state_device={place}") for place in ("same", "host")]
    )
    equal(same, host)
