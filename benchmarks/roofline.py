"""The picture of the kernels benchmark: how much of the speed of a copy each operation reaches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.contract import Record
from benchmarks.kernel_cases import CODES, DEFAULT_BODIES, ENCODES, OPERATIONS, usual
from benchmarks.timing import parse_elements

BAR_COLOURS = ("#9ecae1", "#4292c6", "#08519c")
"""From small to large: what is drawn of the sizes is the smallest, the middle and the largest."""
OTHER_COLOUR = "#d9480f"
SETTINGS = {
    "encode": "bf16 weights and residual",
    "decode_accumulate": f"K={DEFAULT_BODIES}",
    "requantise": f"K={DEFAULT_BODIES}, bf16 residual",
    "outer_step": f"K={DEFAULT_BODIES}, bf16 weights",
}
MARK: Any = {"markeredgecolor": "black", "markeredgewidth": 0.7}
GROUP_WIDTH = 0.8


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel an operation: bars by format and size, and marks for what else was measured; 1 is a copy's speed."""
    figure = Figure(figsize=(11, 7.2), dpi=120, layout="constrained")
    panels = list(figure.subplots(2, 2, sharey=True).flat)
    for axes, operation in zip(panels, OPERATIONS, strict=True):
        _draw_panel(axes, operation, [record for record in records if record.name == operation])
    figure.suptitle("Speed over that of a copy of the same bytes (higher is better)", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.savefig(path, format="png")


def _draw_panel(axes: Axes, operation: str, records: Sequence[Record]) -> None:
    sizes = sorted({str(record.parameters["elements"]) for record in records}, key=parse_elements)
    drawn = list(dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]]))
    shares = {tuple(record.parameters.values()): 1 / record.ratio for record in records if record.ratio}
    width = GROUP_WIDTH / len(drawn)
    for order, size in enumerate(drawn):
        places = [index + (order - (len(drawn) - 1) / 2) * width for index in range(len(CODES))]

        def heights(scale: str, rounding: str = "nearest", size: str = size) -> list[float]:
            return [shares[_usual(operation, size, code, scale, rounding)] for code in CODES]

        colour = BAR_COLOURS[-len(drawn) :][order]
        axes.bar(places, heights("fp16"), 0.92 * width, color=colour, label=f"{size} elements, fp16 scales")
        labels = ("e4m4 scales", "stochastic rounding") if order == 0 else (None, None)
        axes.plot(places, heights("e4m4"), "D", **MARK, markersize=4, markerfacecolor="white", label=labels[0])
        if operation in ENCODES:
            stochastic = heights("fp16", "stochastic")
            axes.plot(places, stochastic, "o", **MARK, markersize=5, markerfacecolor=OTHER_COLOUR, label=labels[1])
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.set_title(f"{operation} ({SETTINGS[operation]})", fontsize=11)
    axes.set_xticks(range(len(CODES)), CODES)
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _usual(operation: str, size: str, code: str, scale: str, rounding: str = "nearest") -> tuple[object, ...]:
    case = usual(operation, parse_elements(size), code, scale)
    if case.rounding is not None:
        case = replace(case, rounding=rounding)
    return tuple(case.parameters.values())
