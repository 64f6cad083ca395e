"""A page of the records that a benchmark wrote with --json: `python -m benchmarks.report FILE > PAGE`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def page(path: Path) -> str:
    """Markdown of one file of records: what was measured, under which conditions, and a table a name of record.

    A picture of the same name beside the file, if the benchmark drew one, is shown before the tables.
    """
    document = json.loads(path.read_text())
    names = dict.fromkeys(record["name"] for record in document["records"])
    groups = [[r for r in document["records"] if r["name"] == name] for name in names]
    quick = " Measured with `--quick`: rough." if document["quick"] else ""
    return "\n".join(
        [
            f"# Benchmark: {document['benchmark']}\n",
            f"Written by `python -m benchmarks.report` from the records in {path.name}, which "
            f"`python -m benchmarks.{document['benchmark']} --json` measured.{quick}",
            "A ratio is the value over that of the reference: smaller is better.\n",
            document["about"].strip() + "\n",
            _conditions(document["conditions"]),
            *_picture(path),
            *(_table(group) for group in groups),
        ]
    )


def _conditions(conditions: dict[str, Any]) -> str:
    gpus = ", ".join(conditions["gpus"]) or "no GPU"
    return (
        f"**Conditions**: {conditions['processor']}, {conditions['cores']} cores, {gpus}; Python "
        f"{conditions['python']}, torch {conditions['torch']}, megatron-core {conditions['megatron-core']}; commit "
        f"{conditions['commit']}; the machine's load was {conditions['load_before']:.1f} before the start.\n"
    )


def _picture(path: Path) -> list[str]:
    picture = path.with_suffix(".png")
    return [f"![The records of {path.name} as a picture]({picture.name})\n"] if picture.exists() else []


def _table(records: Sequence[dict[str, Any]]) -> str:
    keys = list(records[0]["parameters"])
    unit, references = records[0]["unit"], [record["ratio_to"] for record in records]
    one_reference = len(set(references)) == 1
    compared = references[0] is not None
    heads = [*keys, unit]
    if compared:
        heads += [f"over {references[0]}"] if one_reference else ["ratio", "over"]
    rows = [heads, [*["---"] * len(keys), *["---:"] * (len(heads) - len(keys))]]
    for record in records:
        cells = [*(str(value) for value in record["parameters"].values()), _number(record["value"], unit)]
        if compared:
            cells += [_ratio(record["ratio"])] if one_reference else [_ratio(record["ratio"]), record["ratio_to"]]
        rows.append(cells)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    name = records[0]["name"]
    return f"## {name[0].upper()}{name[1:]}\n\n" + "\n".join(lines) + "\n"


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "B" else f"{value:.4g}"


def _ratio(ratio: float) -> str:
    """Small ratios as a fraction of one, which is easier to read."""
    return f"{ratio:.3f}" if ratio >= 0.05 else f"1/{1 / ratio:.4g}"
