"""What every benchmark keeps to: `python -m benchmarks.NAME [--quick] [--json FILE]`.

A benchmark measures itself and what it is compared with in one run, and reports records. A ratio is time (or bytes, or
memory) over that of the reference: smaller is better, 1.00 is as good as the reference.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from dilocox.observe.environment import git_commit


@dataclass(frozen=True)
class Record:
    name: str
    parameters: dict[str, object]
    value: float
    unit: str
    ratio: float | None
    """value / value of the reference; None where there is nothing to compare with."""
    ratio_to: str | None
    """What the reference is."""


def conditions() -> dict[str, object]:
    """The machine and the versions of a measurement; the load says whether others were at work on it."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "commit": git_commit(),
    }


def main(name: str, about: str, run: Callable[[bool], Sequence[Record]]) -> None:
    """Parse the command line, run, print a table, and write JSON beside and renamed.

    `about` says what is measured and how (a benchmark's docstring); `run` takes whether to be quick.
    """
    measure(name, about, command_line(name, about).parse_args(), run)


def command_line(name: str, about: str) -> argparse.ArgumentParser:
    """The options of every benchmark, to which one may add its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures are rougher")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    return parser


def measure(
    name: str,
    about: str,
    arguments: argparse.Namespace,
    run: Callable[[bool], Sequence[Record]],
    draw: Callable[[Sequence[Record], Path], None] | None = None,
) -> None:
    """What `main` does once the command line is parsed; `draw(records, path)` makes a PNG beside the JSON."""
    document = {"benchmark": name, "about": about, "quick": arguments.quick, "conditions": conditions()}
    records = run(arguments.quick)
    print(table(records))
    if arguments.json:
        document["records"] = [asdict(record) for record in records]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        _write(arguments.json, lambda path: path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n"))
        if draw is not None:
            _write(arguments.json.with_suffix(".png"), lambda path: draw(records, path))


def table(records: Sequence[Record]) -> str:
    rows = [("name", "parameters", "value", "unit", "ratio", "to")]
    for record in records:
        parameters = " ".join(f"{key}={value}" for key, value in record.parameters.items())
        ratio = "" if record.ratio is None else f"{record.ratio:.4f}"
        rows.append((record.name, parameters, f"{record.value:.5g}", record.unit, ratio, record.ratio_to or ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Beside and renamed: a reader never sees half a file."""
    beside = path.with_name(f"{path.name}.tmp")
    write(beside)
    beside.replace(path)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
