"""What a person sees while a run goes on: a live table below what should stay in a terminal, plain lines elsewhere."""

import threading
from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console as Terminal
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from dilocox.config import Config, Console
from dilocox.observe.lines import PlainLines
from dilocox.observe.progress import IslandProgress, RunProgress
from dilocox.observe.reader import Tail
from dilocox.observe.recorder import perplexity
from dilocox.observe.schema import METRICS_FILE
from dilocox.observe.units import duration, quantity

POLL_S = 0.5
"""How often the metrics file is looked at."""
WIDE = 110
"""Columns of a terminal in which the table has room for frames."""


class ProgressDisplay:
    """Shows some islands of a run by following its metrics file, from a thread of its own.

    Start it before the islands: what is in the file by then belongs to an earlier launch, and is taken in silently. Use
    it as a context manager, or call `start` and `stop`.
    """

    def __init__(self, config: Config, islands: Sequence[int], terminal: Terminal | None = None) -> None:
        """Show `islands` on `terminal` (by default standard output), as `observe.console` says."""
        self._terminal = terminal or Terminal(highlight=False)
        self._steps = config.steps
        self._name = config.name
        self._run_dir = config.run_dir
        self._tail = Tail(config.run_dir / METRICS_FILE)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        mode = config.observe.console
        if mode is Console.auto:
            mode = Console.live if self._terminal.is_terminal else Console.plain
        self._mode = mode
        self._lines = PlainLines(islands, config.steps, step_lines=mode is Console.plain)

    def start(self) -> None:
        if self._mode is Console.none:
            return
        for record in self._tail.read():
            self._lines.update(record)
        self._lines.flush()
        self._print([f"{self._name}: starting; logs and metrics are in {self._run_dir}"])
        self._thread = threading.Thread(target=self._run, name="progress-display", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what has been recorded until now and end; raises MetricsError when the file could not be read."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "ProgressDisplay":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            if self._mode is Console.live:
                self._show_live()
            else:
                self._show_lines()
        except Exception as error:
            self._error = error

    def _show_lines(self) -> None:
        over = False
        while not over:
            over = self._over.wait(POLL_S)
            for record in self._tail.read():
                self._print(self._lines.update(record))
        self._print(self._lines.flush())

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._terminal.print(line, soft_wrap=True, markup=False)

    def _show_live(self) -> None:
        progress = self._lines.progress
        with Live(console=self._terminal, auto_refresh=False, transient=False) as live:
            over = False
            while not over:
                over = self._over.wait(POLL_S)
                for record in self._tail.read():
                    self._print(self._lines.update(record))
                live.update(table(self._name, progress, self._steps, self._terminal.width), refresh=True)


def table(name: str, progress: RunProgress, steps: int, width: int) -> Table:
    """The live table: a row for each island, the newest held-out loss and checkpoint below; fits 80 columns."""
    on_gpus = any(island.start and island.start.peak_flops for island in progress.islands.values())
    shown = Table(title=escape(name), caption=_caption(progress), title_justify="left", caption_justify="left")
    if width < WIDE:
        shown.box, shown.show_edge, shown.padding = box.SIMPLE_HEAD, False, 0
    for column in ("island", "step", "loss", "tokens/s", *(["MFU"] if on_gpus else [])):
        shown.add_column(column, justify="right", no_wrap=True)
    for column in ("round", "last sync", "in sync", "between", "inside", "left"):
        shown.add_column(column, justify="right", no_wrap=True)
    for number, island in progress.islands.items():
        shown.add_row(str(number), *_row(island, steps, on_gpus))
    return shown


def _row(island: IslandProgress, steps: int, on_gpus: bool) -> list[str]:
    step, sync = island.step, island.sync
    left = island.time_left_s(steps)
    mfu = "" if step is None or step.mfu is None else f"{step.mfu:.1%}"
    return [
        f"{island.steps}/{steps}",
        "" if step is None else f"{step.loss:.4f}",
        "" if step is None else quantity(step.tokens_per_s),
        *([mfu] if on_gpus else []),
        "" if sync is None else str(sync.round),
        "" if sync is None else f"{sync.seconds:.2g} s",
        "" if not island.seconds else f"{island.seconds_in_sync / island.seconds:.1%}",
        quantity(island.bytes_between, "B"),
        quantity(island.bytes_inside, "B"),
        "done" if island.ended else "" if left is None else duration(left),
    ]


def _caption(progress: RunProgress) -> str:
    parts = []
    if (newest := progress.newest_heldout()) is not None:
        step, loss = newest
        parts.append(f"held-out loss {loss:.4f}, perplexity {perplexity(loss):.4g} (anchor, step {step})")
    saved = [island.checkpoint.step for island in progress.islands.values() if island.checkpoint]
    if len(saved) == len(progress.islands):
        parts.append(f"checkpoint at step {min(saved)}")
    return "  ".join(parts)
