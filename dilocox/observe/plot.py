"""`loss.png`: how a run's losses went."""

from collections.abc import Sequence
from functools import partial
from operator import mul
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox.files import beside_name
from dilocox.observe.schema import Evaluation, MetricsError, Record, Start, Step, Sync

PLOT_FILE = "loss.png"
MOST_SYNC_MARKS = 40
"""Rounds beyond which their ends are not marked: the lines would hide the losses."""
MOST_NAMED_ISLANDS = 6
"""Islands beyond which they share one entry of the legend."""


def draw_losses(records: Sequence[Record], run_dir: Path) -> Path:
    """Draw training and held-out losses of current records (`reader.read`) to `loss.png`; returns its path.

    Raises MetricsError when there is no step to draw.
    """
    steps: dict[int, list[Step]] = {}
    for record in records:
        if isinstance(record, Step):
            steps.setdefault(record.island, []).append(record)
    if not steps:
        raise MetricsError("nothing to draw: the records hold no step")
    figure = Figure(figsize=(9, 5.2), dpi=140, layout="constrained")
    axes = figure.subplots()
    _draw_syncs(axes, records)
    _draw_training(axes, steps)
    _draw_heldout(axes, records)
    _label(axes, records, steps)
    path = run_dir / PLOT_FILE
    beside = beside_name(path)
    figure.savefig(beside, format="png")
    beside.replace(path)
    return path


def smoothed(losses: Sequence[float], width: int) -> np.ndarray:
    """The mean of `width` values around each; narrower and centred at the steep start, so that no lag shows."""
    values = np.asarray(losses, dtype=np.float64)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    reach = np.minimum(index, width // 2)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    return (sums[stop] - sums[first]) / (stop - first)


def _draw_training(axes: Axes, steps: dict[int, list[Step]]) -> None:
    colours = matplotlib.colormaps["tab10" if len(steps) <= 10 else "viridis"]
    for order, (island, records) in enumerate(sorted(steps.items())):
        colour = colours(order) if len(steps) <= 10 else colours(order / len(steps))
        x = [record.step for record in records]
        y = [record.loss for record in records]
        name = f"training, island {island}" if len(steps) <= MOST_NAMED_ISLANDS else "training, each island"
        label = name if len(steps) <= MOST_NAMED_ISLANDS or order == 0 else None
        axes.plot(x, y, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(x, smoothed(y, max(1, len(y) // 25)), color=colour, linewidth=1.6, label=label)


def _draw_heldout(axes: Axes, records: Sequence[Record]) -> None:
    by_step: dict[int, list[float]] = {}
    for record in records:
        if isinstance(record, Evaluation):
            by_step.setdefault(record.step, []).append(record.loss)
    if not by_step:
        return
    x = sorted(by_step)
    y = [float(np.mean(by_step[step])) for step in x]
    axes.plot(x, y, "o--", color="black", linewidth=1, markersize=5, label="held out, anchor", zorder=5)
    if x[0] == 0:
        axes.axhline(y[0], color="black", linestyle=":", linewidth=1, alpha=0.6, label=f"untrained, {y[0]:.2f}")
    axes.annotate(
        f"{y[-1]:.3f}",
        (x[-1], y[-1]),
        textcoords="offset points",
        xytext=(-4, 10),
        ha="right",
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _draw_syncs(axes: Axes, records: Sequence[Record]) -> None:
    """A faint line at each step after which islands synced, as long as one can tell them apart."""
    ends = sorted({record.step for record in records if isinstance(record, Sync)})
    if len(ends) > MOST_SYNC_MARKS:
        return
    for order, step in enumerate(ends):
        axes.axvline(step, color="tab:gray", linewidth=0.7, alpha=0.35, label="sync" if order == 0 else None)


def _label(axes: Axes, records: Sequence[Record], steps: dict[int, list[Step]]) -> None:
    axes.set_xlabel("inner step of each island")
    axes.set_ylabel("loss (nats a token)")
    axes.set_xlim(left=0, right=1.01 * max(records[-1].step for records in steps.values()))
    axes.grid(alpha=0.25)
    axes.spines[["right"]].set_visible(False)
    axes.legend(frameon=False)
    start = next((record for record in records if isinstance(record, Start)), None)
    if start is not None:
        axes.set_title(start.run, fontweight="bold")
    last = [records[-1] for records in steps.values()]
    per_step = sum(record.tokens for record in last) / max(record.step for record in last) / 1e6
    top = axes.secondary_xaxis("top", functions=(partial(mul, per_step), partial(mul, 1 / per_step)))
    top.set_xlabel("tokens of all islands (millions)")
