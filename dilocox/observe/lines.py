"""Progress as plain lines, for logs and pipes: some ten for the steps of a run, and one for each held-out loss."""

import math
from collections.abc import Sequence

from dilocox.observe.progress import RunProgress
from dilocox.observe.recorder import perplexity
from dilocox.observe.schema import Evaluation, Record, Resume, Start, Step, Sync
from dilocox.observe.units import duration, quantity

STEP_LINES = 10
"""How many lines about steps a run prints."""


class PlainLines:
    """Turns records of the watched islands into lines."""

    def __init__(self, islands: Sequence[int], steps: int, *, step_lines: bool = True) -> None:
        """Without `step_lines` only what happens rarely is a line: starts and held-out losses."""
        self.progress = RunProgress.of(islands)
        self._steps = steps
        self._every = max(1, steps // STEP_LINES) if step_lines else math.inf
        self._last_step = 0
        self._due = False
        self._starting = set(islands)

    def update(self, record: Record) -> list[str]:
        """Take in a record; returns the lines that it completes."""
        if record.island not in self.progress.islands:
            return []
        lines = [] if isinstance(record, Sync) else self.flush()
        self.progress.update(record)
        match record:
            case Start():
                lines += self._start_lines(record)
            case Resume():
                self._last_step = min(self._last_step, record.step)
                lines.append(f"island {record.island} goes on at step {record.step} from {record.path or 'its start'}")
            case Step():
                self._look_for_step_line()
            case Evaluation():
                lines += self._evaluation_lines(record)
        return lines

    def flush(self) -> list[str]:
        """The line that waits for the syncs of its step, if there is one."""
        lines = [self._step_line(self._last_step)] if self._due else []
        self._due = False
        return lines

    def _start_lines(self, start: Start) -> list[str]:
        self._starting.discard(start.island)
        if self._starting:
            return []
        self._starting = set(self.progress.islands)  # for the next launch
        watched = ", ".join(str(island) for island in self.progress.islands)
        whole = len(self.progress.islands) == start.islands
        together = f"{start.islands} islands, each" if start.islands > 1 else "1 island,"
        islands = together if whole else f"island {watched} of {start.islands},"
        return [
            f"{start.run}: {islands} tp={start.tp} pp={start.pp} dp={start.dp} on "
            f"{start.device}; {start.model} model, {quantity(start.parameters)} parameters, {start.precision}; "
            f"{start.inner_optimizer}; {start.algo}, {start.kernels} kernels"
        ]

    def _look_for_step_line(self) -> None:
        step = self.progress.steps
        marked = step // self._every > self._last_step // self._every
        last = step == self._steps and step > self._last_step and math.isfinite(self._every)
        if marked or last:
            self._last_step = step
            self._due = True

    def _step_line(self, step: int) -> str:
        islands = list(self.progress.islands.values())
        newest = [island.step for island in islands if island.step]
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}", f"loss {_losses([s.loss for s in newest])}"]
        parts.append(f"{quantity(sum(s.tokens_per_s for s in newest))} tokens/s")
        shares = [s.mfu for s in newest if s.mfu is not None]
        if shares:
            parts.append(f"MFU {min(shares):.1%}")
        syncs = [island.sync for island in islands if island.sync]
        if syncs:
            parts.append(f"round {min(s.round for s in syncs)}")
            parts.append(f"sync {max(s.seconds for s in syncs):.3g} s")
            parts.append(f"sent {quantity(sum(i.bytes_between for i in islands), 'B')} between islands")
            parts.append(f"{quantity(sum(i.bytes_inside for i in islands), 'B')} inside")
        left = [left for island in islands if (left := island.time_left_s(self._steps)) is not None]
        if left and step < self._steps:
            parts.append(f"{duration(max(left))} left")
        return "  ".join(parts)

    def _evaluation_lines(self, record: Evaluation) -> list[str]:
        loss = self.progress.heldout_loss(record.step)
        if loss is None:
            return []
        when = "untrained" if record.step == 0 else f"step {record.step}, round {record.round}"
        return [f"held-out loss {loss:.4f}  perplexity {perplexity(loss):.4g}  ({record.of}, {when})"]


def _losses(losses: Sequence[float]) -> str:
    """Of a few islands each, of many the range."""
    if len(losses) <= 4:
        return " ".join(f"{loss:.3f}" for loss in losses)
    return f"{min(losses):.3f} to {max(losses):.3f}"
