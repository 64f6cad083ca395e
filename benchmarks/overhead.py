"""What the outer loop costs a run: CPU time of DiLoCo on two islands over that of their inner steps alone.

Both islands live in one process and take turns; torch runs on one thread, so the CPU time of an island's thread is all
that it does: inner steps, encoding, exchange, merge, outer step, checksums, write-back. Each island trains the same
batches with and without the outer loop in turn, which goes first changing every time, and the median of the ratios
counts. "Outer loop" is the CPU time inside its own calls, which needs no comparison of two long stretches.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.contract import Record, main
from dilocox.config import Config, load_config
from dilocox.data.corpus import open_corpus
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import start_world, stop_world
from dilocox.launchers.inprocess import run_in_turns
from dilocox.method import build_roles
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.protocol import LaneGroup

ISLANDS = 2
INNER_STEPS = 50


@dataclass
class Measured:
    """CPU seconds by repetition."""

    inner: list[float] = field(default_factory=list)
    """Of the inner steps alone."""
    round: list[float] = field(default_factory=list)
    """Of a round: inner steps, outer loop and sync."""
    outer: list[float] = field(default_factory=list)
    """Of that round, inside the outer loop."""

    @property
    def ratio(self) -> float:
        return statistics.median(round / inner for round, inner in zip(self.round, self.inner, strict=True))


def run(quick: bool) -> list[Record]:
    config = load_config(
        [
            "algo=diloco",
            "island=single",
            "launcher=inprocess",
            f"islands={ISLANDS}",
            f"schedule.inner_steps={INNER_STEPS}",
            f"island.batch_size={4 if quick else 16}",
            f"island.micro_batch_size={4 if quick else 16}",
        ]
    )
    torch.set_num_threads(1)
    world = start_world(config.island.layout, config.device)
    batches, vocab_size = _batches(config)
    islands = [
        MegatronIsland(
            world, model=config.model, island=config.island, inner=config.inner, vocab_size=vocab_size, seed=config.seed
        )
        for _ in range(ISLANDS)
    ]
    measured = [Measured() for _ in islands]

    def body(index: int, lane_group: LaneGroup) -> None:
        _measure(measured[index], islands[index], _outer_loop(config, islands[index], lane_group), batches, quick)

    run_in_turns(ISLANDS, "overhead", body)
    stop_world()
    return _records(config, measured)


def _measure(measured: Measured, island: MegatronIsland, outer: OuterLoop, batches: list[Tensor], quick: bool) -> None:
    _inner_steps(island, batches[:10])  # the first steps fill caches and choose kernels
    for repetition in range(2 if quick else 8):
        if repetition % 2 == 0:
            measured.inner.append(_cpu_seconds(lambda: _inner_steps(island, batches)))
        started = time.thread_time()
        measured.outer.append(_round(island, outer, batches))
        measured.round.append(time.thread_time() - started)
        if repetition % 2 == 1:
            measured.inner.append(_cpu_seconds(lambda: _inner_steps(island, batches)))


def _records(config: Config, measured: list[Measured]) -> list[Record]:
    parameters: dict[str, object] = {
        "islands": ISLANDS,
        "inner_steps": INNER_STEPS,
        "codec": "int4",
        "model": config.model.name,
        "batch_size": config.island.batch_size,
    }
    inner = statistics.fmean(statistics.median(island.inner) for island in measured)
    outer = statistics.fmean(statistics.median(island.outer) for island in measured)
    ratio = statistics.fmean(island.ratio for island in measured)
    reference = "inner steps of a round"
    return [
        Record(reference, parameters, inner, "CPU s", None, None),
        Record("round with its sync", parameters, inner * ratio, "CPU s", ratio, reference),
        Record("outer loop in a round", parameters, outer, "CPU s", outer / inner, reference),
    ]


def _batches(config: Config) -> tuple[list[Tensor], int]:
    """A round's microbatches, and the size of the vocabulary."""
    corpus = open_corpus(
        config.data,
        islands=1,
        island=0,
        dp=1,
        dp_rank=0,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        micro_batch_size=config.island.micro_batch_size,
        batch_size=config.island.batch_size,
    )
    return [corpus.train.next_microbatch() for _ in range(INNER_STEPS)], corpus.tokenizer.vocab_size


def _outer_loop(config: Config, island: MegatronIsland, lane_group: LaneGroup) -> OuterLoop:
    return OuterLoop(
        island.weights(),
        roles=build_roles(config),
        lane_group=lane_group,
        island_group=IslandGroup(None, torch.device("cpu")),
        identity={},
        kernels=config.kernels.value,
        publish=island.publish,
    )


def _round(island: MegatronIsland, outer: OuterLoop, batches: list[Tensor]) -> float:
    """A round as `dilocox.train` goes through it; returns the CPU seconds inside the outer loop."""
    progress, seconds = Progress(steps=1), 0.0
    for batch in batches:
        island.forward_backward([batch])
        seconds += _cpu_seconds(lambda: outer.after_backward(progress))
        island.update()
        seconds += _cpu_seconds(lambda: outer.after_update(progress))
    return seconds


def _inner_steps(island: MegatronIsland, batches: list[Tensor]) -> None:
    for batch in batches:
        island.forward_backward([batch])
        island.update()


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    main("overhead", __doc__, run)
