"""The command line: `dilocox train`, `dilocox island`, `dilocox coordinator`.

Settings are Hydra overrides: `dilocox train model=tiny islands=4 codec=int8`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.errors import DilocoxError

if TYPE_CHECKING:
    from dilocox.observe.console import ProgressDisplay


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; an error that a person can mend is printed without a traceback and gives exit code 1."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except DilocoxError as error:
        _tell_launcher(error)
        print(f"dilocox: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        _tell_launcher(error)
        raise


def _tell_launcher(error: Exception) -> None:
    from dilocox.launchers.processes import ERROR_FILE_VARIABLE, report_error

    if ERROR_FILE_VARIABLE in os.environ:
        report_error(Path(os.environ[ERROR_FILE_VARIABLE]), error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dilocox",
        description="Train one language model on several GPU islands.",
        epilog="Every setting, with its default and what it may be, is in conf/; an unknown one is told the nearest. "
        "dilocox train --dry-run shows what settings come to.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="start all islands on this machine and train")
    train.add_argument("--dry-run", action="store_true", help="print who sits where, bytes and memory; start nothing")
    train.set_defaults(run=_train)

    island = commands.add_parser("island", help="be one rank of one island, under torchrun or srun")
    which = island.add_mutually_exclusive_group(required=True)
    which.add_argument("--island", type=int, help="which island this is, counted from 0")
    which.add_argument("--all-islands", action="store_true", help="all of them, in turns (launcher=inprocess)")
    island.add_argument("--islands", type=int, required=True, help="how many islands there are")
    island.add_argument("--rendezvous", metavar="HOST:PORT", help="where the coordinator runs; none for one island")
    island.add_argument("--quiet", action="store_true", help="show nothing, write no summary: the launcher does")
    island.set_defaults(run=_island)

    coordinator = commands.add_parser("coordinator", help="serve the rendezvous at which islands meet")
    coordinator.add_argument("--port", type=int, required=True, help="to listen on; 0 takes a free one")
    coordinator.set_defaults(run=_coordinator)

    for command in (train, island):
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as Hydra overrides")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from dilocox.config import load_config
    from dilocox.method import build_roles

    config = load_config(arguments.overrides)
    build_roles(config)
    if arguments.dry_run:
        from dilocox.dry_run import describe

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may be `head`
        print(describe(config))
        return 0
    from dilocox.data.sources import open_source
    from dilocox.launchers.local import island_command, launch
    from dilocox.observe.console import ProgressDisplay
    from dilocox.observe.finish import finish
    from dilocox.run_folder import check_resume, check_unused, create_folder

    open_source(config.data)
    check_resume(config)
    check_unused(config)
    create_folder(config)
    display = ProgressDisplay(config, range(config.islands))
    try:
        command = island_command(arguments.overrides, config.islands)
        code = launch(config, config.run_dir, command, on_start=display.start, show=lambda m: _show_error(display, m))
    finally:
        display.stop()
    if code == 0:
        print(finish(config.run_dir))
    return code


def _show_error(display: "ProgressDisplay", message: str) -> None:
    display.stop()  # the last thing in the terminal is then the error
    print(f"dilocox: {message}", file=sys.stderr)


def _island(arguments: argparse.Namespace) -> int:
    from dilocox.config import load_config
    from dilocox.launchers.worker import run_all_islands, run_island

    config = load_config([*arguments.overrides, f"islands={arguments.islands}"])
    if arguments.all_islands:
        run_all_islands(config, quiet=arguments.quiet)
    else:
        run_island(config, arguments.island, arguments.rendezvous, quiet=arguments.quiet)
    return 0


def _coordinator(arguments: argparse.Namespace) -> int:
    from dilocox.launchers.rendezvous import serve_rendezvous

    serve_rendezvous(arguments.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
