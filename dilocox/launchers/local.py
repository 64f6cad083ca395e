"""The local launcher: all ranks of all islands as processes on this machine, each island a world of its own.

The launcher hosts the stores (one for each world, one for the rendezvous) on ports that the system chose, so that no
port is ever free between choosing and using it, and none is open beyond this machine.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from dilocox.config import Config, Launcher
from dilocox.launchers.processes import ProcessSpec, run_together
from dilocox.launchers.rendezvous import LOOPBACK, serve_store
from dilocox.outer.transport.rendezvous import Address

IslandCommand = Callable[[int | None, Address], Sequence[str]]
"""The command of a rank of one island, given the rendezvous; None asks for all islands in one world."""


def island_command(overrides: Sequence[str], islands: int) -> IslandCommand:
    """The ranks of dilocox itself, with the overrides that the run was given."""

    def command(island: int | None, rendezvous: Address) -> list[str]:
        place = ["--all-islands"] if island is None else ["--island", str(island), "--rendezvous", str(rendezvous)]
        return [sys.executable, "-m", "dilocox.cli", "island", *place, "--islands", str(islands), "--quiet", *overrides]

    return command


def launch(
    config: Config,
    run_folder: Path,
    command: IslandCommand,
    *,
    on_start: Callable[[], None],
    show: Callable[[str], None],
) -> int:
    """Run all ranks to their end and return the exit code of the run, as `run_together` does.

    Logs go to `run_folder/logs`. With launcher=inprocess there is one world, each of whose ranks holds all islands.
    `on_start` is called once all ranks are started, `show` with the first error (or what stopped the run) after all
    have ended.
    """
    islands = [None] if config.launcher is Launcher.inprocess else list(range(config.islands))
    world_size = config.island.layout.world_size
    rendezvous = serve_store(0, loopback_only=True)
    worlds = [serve_store(0, loopback_only=True) for _ in islands]
    specs = [
        ProcessSpec(
            name=f"rank{rank}" if island is None else f"island{island}-rank{rank}",
            command=command(island, Address(LOOPBACK, rendezvous.port)),
            environment=_environment(config, world, rank, local_rank=place * world_size + rank),
        )
        for place, (island, world) in enumerate(zip(islands, worlds, strict=True))
        for rank in range(world_size)
    ]
    outcome = run_together(specs, run_folder / "logs", on_start=on_start)
    if outcome.failure is not None:
        show(outcome.failure.message)
    elif outcome.exit_code:
        stopped_by = signal.Signals(outcome.exit_code - 128).name
        show(f"stopped by {stopped_by}; the same command with resume=auto goes on from the last checkpoint")
    return outcome.exit_code


def _environment(config: Config, world: TCPStore, rank: int, local_rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),  # counted over the islands of this machine: each rank has a GPU of its own
        "WORLD_SIZE": str(config.island.layout.world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(world.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 too connects to our store and hosts none
        "OMP_NUM_THREADS": str(config.threads_per_rank),
    }
