"""Whole runs for tests: through the command line as a person starts them, or many in one process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.config import load_config
from dilocox.launchers.worker import run_all_islands
from dilocox.observe.reader import read
from dilocox.observe.schema import METRICS_FILE, Checkpoint, End, Evaluation, Record, Step, Sync
from tests.distributed.ranks import run_ranks

TINY = (
    "model.layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.sequence_length=32",
    "island.batch_size=4",
    "island.micro_batch_size=4",
    "inner.warmup_steps=2",
    "evaluation.batches=2",
    "observe.console=plain",
)
"""A model that trains in milliseconds a step; the rest of the run is as it is by default."""


def corpus(folder: Path) -> list[str]:
    """A small corpus of this repository's own tests, much faster to read than the standard library."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    folder.mkdir()
    for part in range(60):
        piece = text[part * len(text) // 60 : (part + 1) * len(text) // 60]
        (folder / f"{part}.txt").write_text(piece)
    return ["data=folder", f"data.path={folder}", "data.heldout_fraction=0.1"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dilocox.cli", *arguments]


def cli(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run dilocox to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )


@dataclass(frozen=True)
class Outcome:
    """What a run recorded, island by island."""

    records: list[Record]

    @property
    def hashes(self) -> list[str]:
        ends = [record for record in self.records if isinstance(record, End)]
        return [end.parameter_hash for end in sorted(ends, key=lambda end: end.island)]

    def losses(self, island: int) -> dict[int, float]:
        steps = [record for record in self.records if isinstance(record, Step)]
        return {record.step: record.loss for record in steps if record.island == island}

    @property
    def heldout(self) -> dict[int, float]:
        found = [record for record in self.records if isinstance(record, Evaluation)]
        return {record.step: record.loss for record in found if record.island == 0}

    def syncs(self, island: int) -> list[Sync]:
        return [record for record in self.records if isinstance(record, Sync) and record.island == island]


def outcome(run_dir: Path) -> Outcome:
    return Outcome(read(run_dir / METRICS_FILE))


def train_in_one_process(runs: Sequence[Sequence[str]]) -> list[Outcome]:
    """Each list of overrides as a run with launcher=inprocess, one after another in one fresh process."""
    outcomes: list[Outcome] = run_ranks(1, _train_all, list(runs), timeout_s=570)[0]
    return outcomes


def _train_all(runs: list[Sequence[str]]) -> list[Outcome]:
    outcomes = []
    for overrides in runs:
        config = load_config([*overrides, "launcher=inprocess", "observe.console=none"])
        run_all_islands(config, quiet=True)
        outcomes.append(outcome(config.run_dir))
    return outcomes


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[str], timeout_s: float = 200
) -> None:
    """Wait for something that a running process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        assert process.poll() is None, f"the run ended before: {what}\n{process.stdout and process.stdout.read()}"
        time.sleep(0.02)


def checkpointed(run_dir: Path, step: int, islands: int) -> Callable[[], bool]:
    """Whether all islands have recorded a checkpoint of `step` or later."""

    def check() -> bool:
        if not (run_dir / METRICS_FILE).exists():
            return False
        found = [record for record in read(run_dir / METRICS_FILE) if isinstance(record, Checkpoint)]
        return len({record.island for record in found if record.step >= step}) == islands

    return check
