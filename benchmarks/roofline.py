"""The picture of the kernels benchmark: how much of the speed of a copy each operation reaches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.contract import Record
from benchmarks.kernel_cases import CODES, DEFAULT_BODIES, ENCODES, OPERATIONS, usual
from benchmarks.timing import parse_elements

BAR_COLOURS = ("#9ecae1", "#4292c6", "#08519c")
"""From small to large: what is drawn of the sizes is the smallest, the middle and the largest."""
OTHER_COLOUR = "#d9480f"
GROUP_WIDTH = 0.8


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel an operation: bars by format and size, and marks for what else was measured; 1 is a copy's speed."""
    figure = Figure(figsize=(11, 7.2), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, operation in zip(panels, OPERATIONS, strict=True):
        _draw_panel(axes, operation, [record for record in records if record.name == operation])
    figure.suptitle(
        "Share of the speed of a copy of the same bytes (higher is better; blocks of 64, bf16 weights and residual)",
        fontsize=11,
    )
    figure.savefig(path, format="png")


def _draw_panel(axes: Axes, operation: str, records: Sequence[Record]) -> None:
    sizes = sorted({str(record.parameters["elements"]) for record in records}, key=parse_elements)
    drawn = list(dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]]))
    shares = {_key(record): _share(record) for record in records}
    width = GROUP_WIDTH / len(drawn)
    for order, size in enumerate(drawn):
        places = [index + (order - (len(drawn) - 1) / 2) * width for index in range(len(CODES))]
        heights = [shares[_usual(operation, size, code, "fp16")] for code in CODES]
        colour = BAR_COLOURS[-len(drawn) :][order]
        axes.bar(places, heights, 0.92 * width, color=colour, label=f"{size} elements")
        others = [shares[_usual(operation, size, code, "e4m4")] for code in CODES]
        axes.plot(places, others, "_", color="black", markersize=9, label="e4m4 scales" if order == 0 else None)
        if operation in ENCODES:
            others = [shares[_usual(operation, size, code, "fp16", "stochastic")] for code in CODES]
            label = "stochastic rounding" if order == 0 else None
            axes.plot(places, others, "o", color=OTHER_COLOUR, markersize=4, label=label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    bodies = "" if operation == "encode" else f", K={DEFAULT_BODIES}"
    axes.set_title(f"{operation}{bodies}", fontsize=11)
    axes.set_xticks(range(len(CODES)), CODES)
    axes.set_ylim(0, max(1.1, 1.08 * max(shares.values())))
    axes.set_ylabel("share of a copy's speed")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=2, loc="lower right", framealpha=0.9)


def _usual(operation: str, size: str, code: str, scale: str, rounding: str = "nearest") -> tuple[object, ...]:
    case = usual(operation, parse_elements(size), code, scale)
    if case.rounding is not None:
        case = replace(case, rounding=rounding)
    return tuple(case.parameters.values())


def _key(record: Record) -> tuple[object, ...]:
    return tuple(record.parameters.values())


def _share(record: Record) -> float:
    assert record.ratio is not None
    return 1 / record.ratio
