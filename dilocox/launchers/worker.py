"""What a rank's process does: join its island's world, claim the run's folder, train one island or all in turns."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

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
        world = start_world(config.island.layout, config.device)
        stack.callback(stop_world)
        _claim(stack, config, world, [island], quiet)
        train(config, island, world, meet, meter)


def run_all_islands(config: Config, *, quiet: bool) -> None:
    """Be one rank of a world on which all islands take turns; shows them all unless `quiet`."""

    def run(island: int, lane_group: LaneGroup) -> None:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # every thread starts with the first GPU
        train(config, island, world, lambda identity: lane_group, meter)

    def give_turn(island: int) -> None:
        meter.current = island

    torch.set_num_threads(config.threads_per_rank)
    with ExitStack() as stack:
        meter = stack.enter_context(InsideMeter())
        world = start_world(config.island.layout, config.device)
        stack.callback(stop_world)
        _claim(stack, config, world, range(config.islands), quiet)
        run_in_turns(config.islands, str(world.lane), run, give_turn)


def _claim(stack: ExitStack, config: Config, world: World, islands: Sequence[int], quiet: bool) -> None:
    """The first rank of an island holds its claim on the run's folder until the process ends, and shows it."""
    if world.lane != Lane(0, 0, 0):
        return
    for island in islands:
        stack.callback(RunFolder(config, island).close)
    if not quiet:
        stack.enter_context(_shown(config, islands))


@contextmanager
def _shown(config: Config, islands: Sequence[int]) -> Iterator[None]:
    with ProgressDisplay(config, islands):
        yield
    if not unfinished(read(config.run_dir / METRICS_FILE)):
        print(finish(config.run_dir))
