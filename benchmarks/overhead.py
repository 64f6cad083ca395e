"""What the outer loop costs a run: CPU time of DiLoCo on two islands over that of their inner steps alone.

Both islands live in one process and take turns, one thread each; torch runs on one thread, so a thread's CPU time is
all that its island does: inner steps, encoding, exchange, merge, outer step, checksums, write-back. Rounds with and
without an outer loop alternate, and their medians are compared.
"""

import statistics
import time
from collections.abc import Callable

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

INNER_STEPS = 50


def run(quick: bool) -> list[Record]:
    settings = ["island=single", "island.batch_size=4", "island.micro_batch_size=4"] if quick else ["island=single"]
    config = load_config([*settings, "launcher=inprocess", f"schedule.inner_steps={INNER_STEPS}"])
    torch.set_num_threads(1)
    world = start_world(config.island.layout, config.device)
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
    batches = [corpus.train.next_microbatch() for _ in range(INNER_STEPS)]
    islands = [
        MegatronIsland(
            model=config.model,
            island=config.island,
            inner=config.inner,
            vocab_size=corpus.tokenizer.vocab_size,
            seed=config.seed,
            world=world,
        )
        for _ in range(2)
    ]
    bare: list[list[float]] = [[], []]
    diloco: list[list[float]] = [[], []]

    def body(index: int, lane_group: LaneGroup) -> None:
        outer = _outer_loop(config, islands[index], lane_group)
        for _ in range(3 if quick else 9):
            bare[index].append(_cpu_seconds(lambda: _inner_steps(islands[index], batches)))
            diloco[index].append(_cpu_seconds(lambda: _round(islands[index], outer, batches)))

    run_in_turns(len(islands), "overhead", body)
    stop_world()
    reference, measured = (sum(map(statistics.median, times)) for times in (bare, diloco))
    parameters = {"islands": 2, "inner_steps": INNER_STEPS, "codec": "int4", "model": config.model.name}
    return [
        Record("inner steps of a round", parameters, reference, "CPU s", None, None),
        Record("round with its sync", parameters, measured, "CPU s", measured / reference, "inner steps of a round"),
    ]


def _outer_loop(config: Config, island: MegatronIsland, lane_group: LaneGroup) -> OuterLoop:
    return OuterLoop(
        island.weights(),
        roles=build_roles(config),
        lane_group=lane_group,
        island_group=IslandGroup(None, torch.device("cpu")),
        identity={},
        publish=island.publish,
    )


def _round(island: MegatronIsland, outer: OuterLoop, batches: list[Tensor]) -> None:
    for batch in batches:
        island.forward_backward([batch])
        outer.after_backward(Progress(steps=1))
        island.update()
        outer.after_update(Progress(steps=1))


def _inner_steps(island: MegatronIsland, batches: list[Tensor]) -> None:
    for batch in batches:
        island.forward_backward([batch])
        island.update()


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    main("overhead", run)
