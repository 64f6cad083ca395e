"""Benchmarks keep to their contract, their pages say what the records hold, and committed pages are up to date."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contract import Record
from benchmarks.exchanges import exchange_records, sync_bytes
from benchmarks.report import page
from dilocox.config import load_config
from dilocox.data.tokenizer import build_tokenizer
from dilocox.traffic import predict_between

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())
PAGES = sorted(path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.json"))


def check_document(document: dict[str, Any]) -> list[Record]:
    """The records of a file, each of which is a measurement that can be read without its benchmark."""
    assert {"benchmark", "about", "quick", "conditions", "records"} == document.keys()
    records = [Record(**record) for record in document["records"]]
    assert records
    for record in records:
        assert record.name
        assert record.unit
        assert math.isfinite(record.value)
        assert record.value > 0
        assert (record.ratio is None) == (record.ratio_to is None)
        assert record.ratio is None or 0 < record.ratio < math.inf
    keys = [(record.name, json.dumps(record.parameters)) for record in records]
    assert len(set(keys)) == len(keys), "two records of one name have the same parameters"
    return records


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_quick_run_writes_valid_records(name: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert (document["benchmark"], document["quick"]) == (name, True)
    records = check_document(document)
    assert file.name in {path.name for path in file.parent.iterdir()} <= {file.name, file.with_suffix(".png").name}
    assert len(done.stdout.splitlines()) == 1 + len(records)
    assert all(record.name.lower() in page(file).lower() for record in records)


def test_every_benchmark_has_a_committed_page() -> None:
    assert set(PAGES) <= set(BENCHMARKS)
    assert {"first", "overhead"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_those_of_the_committed_records(name: str) -> None:
    file = ROOT / "docs" / "benchmarks" / f"{name}.json"
    document = json.loads(file.read_text())
    check_document(document)
    assert document["quick"] is False
    assert file.with_suffix(".md").read_text() == page(file)


def test_committed_overhead_of_the_outer_loop_is_at_most_three_percent() -> None:
    document = json.loads((ROOT / "docs" / "benchmarks" / "overhead.json").read_text())
    (record,) = [r for r in check_document(document) if r.name == "round with its sync"]
    assert record.parameters["inner_steps"] == 50
    assert record.ratio is not None
    assert record.ratio <= 1.03


def test_a_page_shows_values_ratios_and_their_references(tmp_path: Path) -> None:
    records = [
        Record("reference", {"ranks": 1}, 0.25, "s", None, None),
        Record("step", {"island": "tp2"}, 0.5, "s", 2.0, "reference"),
        Record("step", {"island": "single"}, 0.005, "s", 0.02, "reference"),
        Record("bytes", {"codec": "int4"}, 1234567, "B", 1.5, "one thing"),
        Record("bytes", {"codec": "int8"}, 7, "B", 0.5, "another"),
    ]
    conditions = {"processor": "P", "cores": 3, "gpus": [], "load_before": 0.25, "python": "3", "torch": "2"}
    document = {
        "benchmark": "name",
        "about": "What it is about.",
        "quick": True,
        "conditions": conditions | {"megatron-core": "1", "commit": None},
        "records": [asdict(record) for record in records],
    }
    file = tmp_path / "records.json"
    file.write_text(json.dumps(document))
    lines = page(file).splitlines()
    assert "What it is about." in lines
    assert "| 1 | 0.25 |" in lines
    assert "| island | s | over reference |" in lines
    assert "| tp2 | 0.5 | 2.000 |" in lines
    assert "| single | 0.005 | 1/50 |" in lines
    assert "| int4 | 1,234,567 | 1.500 | one thing |" in lines
    assert "| int8 | 7 | 0.500 | another |" in lines


@pytest.mark.parametrize(("islands", "exchange"), [(3, "all_gather"), (4, "reduce_scatter")])
def test_the_bytes_measured_are_the_bytes_predicted(islands: int, exchange: str) -> None:
    config = load_config([f"islands={islands}", "island=single", f"exchange={exchange}"])
    sent, parameters = sync_bytes(config)
    predicted = predict_between(config, build_tokenizer(config.data.tokenizer).vocab_size)
    assert parameters == predicted.parameters
    assert sent == max(predicted.bytes_per_sync(island) for island in range(islands))


def test_bytes_follow_the_formulas_and_fall_below_a_hundredth() -> None:
    records = exchange_records(("int4",), (4,))
    syncs = {r.parameters["exchange"]: r for r in records if r.name == "bytes in a sync by exchange"}
    ratios = {r.parameters["exchange"]: r.ratio or 0 for r in records if r.name == "bytes in an inner step by exchange"}
    assert syncs["all_gather"].value / syncs["reduce_scatter"].value == pytest.approx(2, rel=1e-2)
    assert all(record.ratio == pytest.approx(1, rel=1e-2) for record in syncs.values())
    assert ratios["reduce_scatter"] == pytest.approx(4.25 / (32 * 25), rel=1e-2)
    assert ratios["reduce_scatter"] < 1 / 100 < ratios["all_gather"]
