"""Made-up runs for the tests of what a person sees: configurations and the records of whole runs."""

from pathlib import Path
from typing import Any

import torch

from dilocox.config import Config, Precision, load_config
from dilocox.observe.reader import read
from dilocox.observe.recorder import Recorder
from dilocox.observe.schema import METRICS_FILE, Record

PADDED_VOCAB = 384
ROUND_STEPS = 50
EVALUATION_STEPS = 100


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config([f"runs_dir={tmp_path}", "name=test", *overrides])


def start(recorder: Recorder, **changes: Any) -> None:
    recorder.start(
        **{
            "device": torch.device("cpu"),
            "precision": Precision.fp32,
            "inner_optimizer": "AdamW of torch",
            "kernels": "cpu",
            "padded_vocab_size": PADDED_VOCAB,
        }
        | changes
    )


def loss(step: int, island: int) -> float:
    return 2 + 3.5 * 0.98**step + 0.01 * island


def take_steps(recorder: Recorder, island: int, first: int, last: int) -> None:
    """Record inner steps first … last with their syncs, evaluations and checkpoints."""
    for step in range(first, last + 1):
        recorder.step(step=step, loss=loss(step, island), lr=1e-3, grad_norm=1.5, tokens=step * 2048, seconds=0.125)
        if step % ROUND_STEPS == 0:
            round = step // ROUND_STEPS
            sync(recorder, step=step, round=round)
            recorder.checkpoint(step=step, round=round, seconds=0.2, bytes=1000, path=f"checkpoints/{step}")
        if step % EVALUATION_STEPS == 0:
            recorder.evaluation(step=step, round=step // ROUND_STEPS, loss=loss(step, island))


def sync(recorder: Recorder, *, step: int, round: int) -> None:
    recorder.sync(
        step=step,
        round=round,
        number=round,
        fragment="all",
        seconds=0.5,
        wait_s=0.25,
        attempts=1,
        bytes_sent=430,
        bytes_received=430,
        bytes_inside=10_000,
        parameters=800,
        pseudo_gradient_norm=0.75,
        pseudo_gradient_max=0.01,
        checksum=step,
    )


def end(recorder: Recorder, steps: int, parameter_hash: str = "cafe") -> None:
    recorder.end(
        step=steps,
        round=steps // ROUND_STEPS,
        tokens=steps * 2048,
        bytes_inside=7,
        parameter_hash=parameter_hash,
        peak_memory_bytes=[10, 20],
    )


def record_run(config: Config) -> list[Record]:
    """Record a whole run of all its islands into its folder; returns what counts of it."""
    recorders = [Recorder(config, island, leader=True) for island in range(config.islands)]
    for recorder in recorders:
        start(recorder)
        recorder.evaluation(step=0, round=0, loss=5.5)
    for first in range(1, config.steps + 1, ROUND_STEPS):
        for island, recorder in enumerate(recorders):
            take_steps(recorder, island, first, min(first + ROUND_STEPS - 1, config.steps))
    for recorder in recorders:
        end(recorder, config.steps)
        recorder.__exit__(None, None, None)
    return read(config.run_dir / METRICS_FILE)
