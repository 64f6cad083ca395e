"""Training runs to be measured: islands as processes under the local launcher, and the same model in plain torch."""

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.plain import PlainGPT
from dilocox.config import Config, load_config
from dilocox.data.corpus import open_corpus
from dilocox.islands.inner_schedule import InnerSchedule
from dilocox.launchers.local import island_command, launch
from dilocox.observe.environment import peak_memory_bytes
from dilocox.observe.reader import read
from dilocox.observe.schema import METRICS_FILE, End, Step, Sync

WARM_UP_STEPS = 2
"""The first steps fill caches and choose kernels; they are left out, and so is the first sync."""


@dataclass(frozen=True)
class PlainRun:
    step_s: float
    """Median of the inner steps."""
    peak_memory_bytes: int
    parameters: int


@dataclass(frozen=True)
class IslandsRun:
    step_s: float
    """Median of the inner steps of all islands, without syncs."""
    sync_s: float
    """Median of the syncs, each at the island that waited least: that comes last and finds the others there."""
    bytes_sent: int
    """Of the island that sends most, in one sync."""
    peak_memory_bytes: int
    """Of the rank that needs most."""
    parameters: int


def train_islands(overrides: Sequence[str]) -> IslandsRun:
    """A whole run of `dilocox train` with these settings, in a folder that is thrown away.

    Raises RuntimeError with the first rank's error when the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = [*overrides, f"runs_dir={folder}", "checkpoint.every_steps=0", "evaluation.batches=1"]
        config = load_config(settings)
        errors: list[str] = []
        command = island_command(settings, config.islands)
        code = launch(config, config.run_dir, command, on_start=lambda: None, show=errors.append)
        if code:
            raise RuntimeError(f"the run with {' '.join(overrides)} ended with exit code {code}: {' '.join(errors)}")
        return _measured(config.run_dir)


def _measured(run_dir: Path) -> IslandsRun:
    records = read(run_dir / METRICS_FILE)
    syncs: dict[int, list[Sync]] = {}
    for record in records:
        if isinstance(record, Sync):
            syncs.setdefault(record.number, []).append(record)
    ends = [record for record in records if isinstance(record, End)]
    return IslandsRun(
        step_s=statistics.median(r.step_s for r in records if isinstance(r, Step) and r.step > WARM_UP_STEPS),
        sync_s=statistics.median(min(r.seconds for r in ranks) for number, ranks in syncs.items() if number > 1),
        bytes_sent=max(record.bytes_sent for record in syncs[1]),
        peak_memory_bytes=max(peak for end in ends for peak in end.peak_memory_bytes),
        parameters=syncs[1][0].parameters,
    )


def train_plain(overrides: Sequence[str]) -> PlainRun:
    """The same model, data, batch and AdamW in plain torch on one rank's threads, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train_plain, load_config(overrides)).result()


def _train_plain(config: Config) -> PlainRun:
    torch.set_num_threads(config.threads_per_rank)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = open_corpus(
        config.data,
        islands=config.islands,
        island=0,
        dp=1,
        dp_rank=0,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        micro_batch_size=config.island.batch_size,
        batch_size=config.island.batch_size,
    )
    torch.manual_seed(config.seed)
    model = PlainGPT(config.model, corpus.tokenizer.vocab_size).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=config.model.init_std)
    optimizer, schedule = _adamw(config, model), InnerSchedule.of(config.inner)
    seconds = []
    for step in range(1, config.steps + 1):
        started = time.monotonic()
        tokens = corpus.train.next_microbatch().to(device)
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        optimizer.step()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"plain torch, step {step}: the loss is {loss.item()}")
        seconds.append(time.monotonic() - started)
    return PlainRun(
        step_s=statistics.median(seconds[WARM_UP_STEPS:]),
        peak_memory_bytes=peak_memory_bytes(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _adamw(config: Config, model: PlainGPT) -> torch.optim.AdamW:
    """torch's fused AdamW; norms are not decayed, as inside an island."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.inner.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=config.inner.betas, eps=config.inner.epsilon, fused=True)
