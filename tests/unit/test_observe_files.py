"""The metrics file: its schema, its page, several writers, torn lines, and what a resume cancels."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.observe.reader import Tail, current, read
from dilocox.observe.schema import KINDS, End, MetricsError, Record, Resume, Step, from_line, page, to_line
from dilocox.observe.writer import MetricsWriter

_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
    str | None: st.none() | st.text(),
    list[int]: st.lists(st.integers()),
    dict[str, str]: st.dictionaries(st.text(), st.text()),
}


def _records(kind: type[Record]) -> st.SearchStrategy[Record]:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != "kind"}
    return st.builds(kind, **{name: _VALUES[hint] for name, hint in hints.items()})


any_record = st.sampled_from(sorted(KINDS.values(), key=lambda kind: kind.kind)).flatmap(_records)

STEP = Step(
    time=1.0,
    island=0,
    step=1,
    loss=2.5,
    lr=1e-3,
    grad_norm=1.0,
    tokens=8,
    step_s=0.5,
    tokens_per_s=16.0,
    mfu=None,
)
END = End(time=9.0, island=0, step=4, round=2, tokens=8, bytes_inside=0, parameter_hash="a", peak_memory_bytes=[1])


@given(any_record)
def test_a_record_comes_back_from_its_line(record: Record) -> None:
    line = to_line(record)
    assert line.count("\n") == 1
    assert line.endswith("}\n")
    assert from_line(line) == record


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_and_comes_back_as_nan(loss: float) -> None:
    line = to_line(replace(STEP, loss=loss))
    assert '"loss": null' in line
    back = from_line(line)
    assert isinstance(back, Step)
    assert math.isnan(back.loss)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"loss": 2.5', '"loss": "2.5"', "loss='2.5', expected number"),
        ('"tokens": 8', '"tokens": 8.5', "tokens=8.5, expected integer"),
        ('"tokens": 8', '"tokens": true', "tokens=True, expected integer"),
        ('"tokens": 8', '"tokens": null', "tokens=None, expected integer"),
        ('"tokens": 8', '"token": 8', "unknown or missing field token, tokens"),
        ('"mfu": null', '"mfu": []', "mfu=.*, expected number or null"),
        ('"kind": "step"', '"kind": "stop"', "kind is one of start"),
        ('{"kind"', '"kind"', "not JSON"),
    ],
)
def test_a_line_against_the_schema_is_refused_by_field(old: str, new: str, named: str) -> None:
    line = to_line(STEP)
    assert old in line
    with pytest.raises(MetricsError, match=named):
        from_line(line.replace(old, new))


def test_the_documented_page_is_the_generated_one() -> None:
    documented = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert documented.read_text() == page(), "run: python -m dilocox.observe.schema > docs/metrics.md"


def test_the_page_names_every_field() -> None:
    for kind, record in KINDS.items():
        section = page().split(f"\n## {kind}\n")[1].split("\n## ")[0]
        for name in get_type_hints(record):
            assert name == "kind" or f"| `{name}` |" in section


_APPEND = """
import sys
from pathlib import Path
from dilocox.observe.schema import Resume
from dilocox.observe.writer import MetricsWriter
island, lines = int(sys.argv[2]), int(sys.argv[3])
writer = MetricsWriter(Path(sys.argv[1]))
for step in range(lines):
    writer.write(Resume(time=0.0, island=island, step=step, path="x" * 5000))
"""


def test_processes_that_share_a_file_append_whole_lines_in_order(tmp_path: Path) -> None:
    path, lines, islands = tmp_path / "metrics.jsonl", 300, 3
    writers = [
        subprocess.Popen([sys.executable, "-c", _APPEND, str(path), str(island), str(lines)])
        for island in range(islands)
    ]
    assert [writer.wait() for writer in writers] == [0] * islands
    records = Tail(path).read()
    for island in range(islands):
        mine = [record for record in records if record.island == island]
        assert [record.step for record in mine if isinstance(record, Resume)] == list(range(lines))


@given(st.data())
def test_a_file_torn_anywhere_loses_its_torn_line_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    records = [replace(STEP, step=step) for step in range(1, 5)]
    lines = [to_line(record).encode() for record in records]
    whole = data.draw(st.integers(0, len(lines) - 1))
    kept = data.draw(st.integers(0, len(lines[whole]) - 2))  # of the torn line, without its closing brace
    path.write_bytes(b"".join(lines[:whole]) + lines[whole][:kept])
    assert read(path) == records[:whole]
    writer = MetricsWriter(path)
    writer.write(END)
    writer.close()
    assert read(path) == [*records[:whole], END]


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(STEP) + to_line(STEP).replace("loss", "lost"))
    with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 2: kind=step: unknown or missing field loss, lost"):
        read(path)


@given(st.lists(any_record, max_size=5), st.data())
def test_tailing_a_growing_file_gives_each_record_once(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    content = "".join(map(to_line, records)).encode()
    tail = Tail(path)
    assert tail.read() == []
    seen: list[Record] = []
    while content:
        size = data.draw(st.integers(1, len(content)))
        with path.open("ab") as file:
            file.write(content[:size])
        content = content[size:]
        seen += tail.read()
    assert seen == records


@given(steps=st.integers(1, 12), kills=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4))
def test_after_resumes_what_counts_is_what_an_unbroken_run_records(steps: int, kills: list[tuple[int, int]]) -> None:
    """An island is killed after some step and resumed at an earlier one, several times; another one is not."""
    other = [replace(STEP, island=1, step=step) for step in range(1, steps + 1)]
    written: list[Record] = [*other]
    done = 0
    for reached, resumed in kills:
        reached = max(done, min(reached, steps))
        written += [replace(STEP, step=step) for step in range(done + 1, reached + 1)]
        if reached == steps:
            written.append(replace(END, step=steps))
        done = min(resumed, reached)
        written.append(Resume(time=0.0, island=0, step=done, path=None))
    written += [replace(STEP, step=step) for step in range(done + 1, steps + 1)]
    written.append(replace(END, step=steps))
    counts = [record for record in current(written) if not isinstance(record, Resume)]
    assert [r for r in counts if r.island == 1] == other
    assert [r for r in counts if r.island == 0] == [
        *(replace(STEP, step=step) for step in range(1, steps + 1)),
        replace(END, step=steps),
    ]
