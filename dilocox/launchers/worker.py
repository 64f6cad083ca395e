"""What a rank's process does: join its island's world, claim the run's folder, train one island or all in turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch

from dilocox.config import Config
from dilocox.islands.world import World, start_world, stop_world
from dilocox.launchers.inprocess import run_in_turns
from dilocox.observe.console import ProgressDisplay
from dilocox.observe.finish import finish
from dilocox.observe.reader import read
from dilocox.observe.schema import METRICS_FILE
from dilocox.observe.summary import unfinished
from dilocox.outer.modules import join
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.run_folder import RunFolder
from dilocox.topology import Lane
from dilocox.traffic import InsideMeter
from dilocox.train import train

OWN_WORK = timedelta(minutes=30)
"""What a rank may do alone while its island waits: read a corpus, verify a checkpoint, compile."""


def run_island(config: Config, island: int, rendezvous: str | None, *, quiet: bool) -> None:
    """Be one rank of one island; the others are processes of their own, here or elsewhere.

    Unless `quiet`, the island's first rank shows its progress, and the last island to end writes the run's summary.
    """

    def meet(identity: Mapping[str, object]) -> LaneGroup:
        return join(
            rendezvous,
            identity,
            island=island,
            islands=config.islands,
            lane=str(world.lane),
            leader=world.lane == Lane(0, 0, 0),
            timeout_s=config.participation["timeout_s"],
        )

    torch.set_num_threads(config.threads_per_rank)
    with ExitStack() as stack:
        meter = stack.enter_context(InsideMeter())
        world = stack.enter_context(island_world(config))
        [begin] = _claim(stack, config, world, [island], quiet)
        train(config, island, world, meet, meter, begin)


def run_all_islands(config: Config, *, quiet: bool) -> None:
    """Be one rank of a world on which all islands take turns; shows them all unless `quiet`."""

    def run(island: int, lane_group: LaneGroup) -> None:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # every thread starts with the first GPU
        train(config, island, world, lambda identity: lane_group, meter, begin[island])

    def give_turn(island: int) -> None:
        meter.current = island

    torch.set_num_threads(config.threads_per_rank)
    with ExitStack() as stack:
        meter = stack.enter_context(InsideMeter())
        world = stack.enter_context(island_world(config))
        begin = _claim(stack, config, world, range(config.islands), quiet)
        run_in_turns(config.islands, str(world.lane), run, give_turn)


@contextmanager
def island_world(config: Config) -> Iterator[World]:
    """The world of this island's ranks, which wait for each other longer than one of them may wait for another island.

    One that waits for another island's message may do so twice before it tells its own island: for a connection, and
    on it.
    """
    longest_between_islands = timedelta(seconds=2 * config.participation["timeout_s"])
    world = start_world(config.island.layout, config.device, timeout=longest_between_islands + OWN_WORK)
    try:
        yield world
    finally:
        stop_world()


def _claim(
    stack: ExitStack, config: Config, world: World, islands: Sequence[int], quiet: bool
) -> list[Callable[[], None]]:
    """The first rank of an island holds its claim on the run's folder until the process ends, and shows it.

    Returns what each island is to call when it begins to train.
    """
    if world.lane != Lane(0, 0, 0):
        return [lambda: None for _ in islands]
    folders = [RunFolder(config, island) for island in islands]
    for folder in folders:
        stack.callback(folder.close)
    if not quiet:
        stack.enter_context(_shown(config, islands))
    return [folder.begin for folder in folders]


@contextmanager
def _shown(config: Config, islands: Sequence[int]) -> Iterator[None]:
    with ProgressDisplay(config, islands):
        yield
    if not unfinished(read(config.run_dir / METRICS_FILE)):
        print(finish(config.run_dir))
