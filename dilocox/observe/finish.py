"""The end of a run: its summary and picture, from its records."""

from pathlib import Path

from dilocox.observe.plot import draw_losses
from dilocox.observe.reader import read
from dilocox.observe.schema import METRICS_FILE
from dilocox.observe.summary import describe, summarise, write_summary


def finish(run_dir: Path) -> str:
    """Write `summary.json` and `loss.png` of a run whose islands have all ended; returns a few lines for a person."""
    records = read(run_dir / METRICS_FILE)
    summary = summarise(records)
    written = [write_summary(summary, run_dir), draw_losses(records, run_dir)]
    return f"{describe(summary)}\nwritten          {' '.join(map(str, written))}"
