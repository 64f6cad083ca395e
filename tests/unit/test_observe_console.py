"""The live table and the plain lines, rendered to a buffer."""

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Terminal

from dilocox.config import Config, Console
from dilocox.observe.console import ProgressDisplay, table
from dilocox.observe.lines import PlainLines
from dilocox.observe.progress import RunProgress
from dilocox.observe.recorder import Recorder
from dilocox.observe.schema import METRICS_FILE, MetricsError, Record, Start, Step
from dilocox.observe.units import duration, quantity
from tests import observe_harness as made_up


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return made_up.config(tmp_path_factory.mktemp("runs"), "steps=500")


@pytest.fixture(scope="module")
def records(config: Config) -> list[Record]:
    return made_up.record_run(config)


def _rendered(progress: RunProgress, width: int = 120) -> str:
    out = io.StringIO()
    Terminal(file=out, width=width).print(table("test", progress, 500, width))
    return out.getvalue()


def _shown(config: Config, terminal: Terminal, during: list[int]) -> str:
    """What a display writes while islands `during` record fifty steps."""
    with ProgressDisplay(config, range(config.islands), terminal):
        for island in during:
            with Recorder(config, island, leader=True) as recorder:
                made_up.start(recorder)
                made_up.take_steps(recorder, island, 1, 50)
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_a_run_of_500_steps_is_some_twenty_readable_lines(records: list[Record]) -> None:
    plain = PlainLines(range(2), 500)
    lines = [line for record in records for line in plain.update(record)]
    assert 15 <= len(lines) <= 22
    assert re.match(r"test: 2 islands, each tp=2 pp=1 dp=1 on cpu; tiny model, 788k parameters, fp32", lines[0])
    assert lines[1] == "held-out loss 5.5000  perplexity 244.7  (anchor, untrained)"
    steps = [line for line in lines if line.startswith("step")]
    assert [int(line.split("/")[0].removeprefix("step")) for line in steps] == list(range(50, 501, 50))
    assert (
        "loss 2.062 2.072  32.8k tokens/s  round 4  sync 0.5 s  sent 3.44 kB between islands  80 kB inside" in steps[3]
    )
    assert steps[0].endswith("left")
    assert not steps[-1].endswith("left")


def test_an_island_alone_prints_its_own_lines(records: list[Record]) -> None:
    plain = PlainLines([1], 500)
    lines = [line for record in records for line in plain.update(record)]
    assert lines[0].startswith("test: island 1 of 2")
    assert any("loss 2.072  16.4k tokens/s" in line for line in lines)


def test_many_islands_share_a_line_with_the_range_of_their_losses(tmp_path: Path) -> None:
    records = made_up.record_run(made_up.config(tmp_path, "steps=50", "islands=9"))
    plain = PlainLines(range(9), 50)
    lines = [line for record in records for line in plain.update(record)]
    assert max(map(len, lines)) < 200
    assert "loss 3.275 to 3.355" in lines[-1]


@given(steps=st.integers(1, 300), every=st.integers(1, 100))
def test_a_run_of_any_length_prints_its_last_step_and_not_too_much(steps: int, every: int) -> None:
    plain = PlainLines([0], steps)
    step = Step(
        time=0.0, island=0, step=0, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, step_s=1.0, tokens_per_s=1.0, mfu=None
    )
    recorded = [number for number in range(1, steps + 1) if number % every == 0 or number == steps]
    lines = [line for number in recorded for line in plain.update(replace(step, step=number, time=float(number)))]
    lines += plain.flush()
    assert 1 <= len(lines) <= 20
    assert lines[-1].startswith(f"step {steps}/{steps}")
    assert len(set(lines)) == len(lines)


def test_the_table_shows_each_island(records: list[Record]) -> None:
    progress = RunProgress.of(range(2))
    for record in records:
        progress.update(record)
    text = _rendered(progress)
    assert re.search(r"0 │ 500/500 │ 2\.0001 │ +16\.4k │ +10 │ +0\.5 s │", text)
    assert re.search(r"1 │ 500/500 │ 2\.0101 │", text)
    assert re.search(r"4\.3 kB │ 100 kB │ done", text)
    assert "held-out loss 2.0051, perplexity 7.427 (anchor, step 500)" in text
    assert "checkpoint at step 500" in text
    assert "MFU" not in text


def test_the_table_is_whole_in_eighty_columns(records: list[Record]) -> None:
    progress = RunProgress.of(range(2))
    for record in records:
        progress.update(record)
    text = _rendered(progress, width=80)
    assert "…" not in text
    assert re.search(r"1 500/500 2\.0101 +16\.4k +10 +0\.5 s", text)


def test_the_table_shows_mfu_on_gpus_and_time_left(records: list[Record]) -> None:
    progress = RunProgress.of([0])
    start = next(record for record in records if isinstance(record, Start))
    step = next(record for record in records if isinstance(record, Step))
    progress.update(replace(start, peak_flops=989e12))
    for number in (10, 20):
        progress.update(replace(step, step=number, time=float(number), mfu=0.425))
    text = _rendered(progress)
    assert "MFU" in text
    assert "42.5%" in text
    assert "8:00" in text  # 480 steps at a second each


def test_the_table_before_anything_was_recorded() -> None:
    assert _rendered(RunProgress.of(range(2))).count("0/500") == 2


def test_plain_display_follows_the_file(config: Config) -> None:
    fresh = replace(config, name="plain")
    text = _shown(fresh, Terminal(file=io.StringIO(), width=80), [0, 1])
    assert text.count("step  50/500") == 1
    assert text.startswith(f"plain: starting; logs and metrics are in {fresh.run_dir}\nplain: 2 islands, each")
    assert max(map(len, text.splitlines())) > 80, "a line was wrapped to the width of a terminal that is none"


def test_live_display_draws_the_table(config: Config) -> None:
    fresh = replace(config, name="live")
    text = _shown(fresh, Terminal(file=io.StringIO(), width=120, force_terminal=True), [0, 1])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    newest = text.split("┏")[-1]
    assert len(re.findall(r"│ +50/500 │", newest)) == 2
    assert text.startswith(f"live: starting; logs and metrics are in {fresh.run_dir}")
    assert "live: 2 islands, each" in text
    assert "step  50/500  loss" not in text


def test_no_display_writes_nothing_and_reads_nothing(config: Config) -> None:
    silent = replace(config, name="none", observe=replace(config.observe, console=Console.none))
    assert _shown(silent, Terminal(file=io.StringIO()), [0, 1]) == ""


def test_a_resumed_run_does_not_repeat_the_lines_of_the_launch_before(config: Config) -> None:
    resumed = replace(config, name="resumed", islands=1)
    with Recorder(resumed, 0, leader=True) as recorder:
        made_up.start(recorder)
        made_up.take_steps(recorder, 0, 1, 110)
    terminal = Terminal(file=io.StringIO())
    with ProgressDisplay(resumed, [0], terminal), Recorder(resumed, 0, leader=True) as recorder:
        made_up.start(recorder)
        recorder.resume(step=100, path="checkpoints/100")
        made_up.take_steps(recorder, 0, 101, 150)
    lines = terminal.file.getvalue().splitlines()
    assert lines[1].startswith("resumed: 1 island, tp=2")
    assert lines[2] == "island 0 goes on at step 100 from checkpoints/100"
    assert [line.split("  ")[0] for line in lines[3:]] == ["step 150/500"]


def test_a_metrics_file_that_cannot_be_read_is_an_error_of_the_display(config: Config) -> None:
    broken = replace(config, name="broken")
    broken.run_dir.mkdir()
    display = ProgressDisplay(broken, [0], Terminal(file=io.StringIO()))
    display.start()
    (broken.run_dir / METRICS_FILE).write_text('{"kind": "step"}\n')
    with pytest.raises(MetricsError, match="line 1"):
        display.stop()


def test_stopping_shows_what_was_recorded_until_then_at_once(config: Config) -> None:
    quick = replace(config, name="quick", islands=1)
    terminal = Terminal(file=io.StringIO())
    display = ProgressDisplay(quick, [0], terminal)
    display.start()
    time.sleep(0.05)  # the display waits for its next look by now
    with Recorder(quick, 0, leader=True) as recorder:
        made_up.take_steps(recorder, 0, 1, 50)
    display.stop()
    display.stop()
    assert "step  50/500" in terminal.file.getvalue()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1234567, "B", "1.23 MB"),
        (999_600, "", "1M"),
        (850_000, "", "850k"),
        (12.345, "", "12.3"),
        (7e9, "", "7G"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@given(st.floats(1, 1e14))
def test_a_quantity_is_short_and_right_to_three_digits(value: float) -> None:
    text = quantity(value)
    number, prefix = re.fullmatch(r"([0-9.]+)([kMGTP]?)", text).groups()  # type: ignore[union-attr]
    assert float(number) * 1000 ** " kMGTP".index(prefix or " ") == pytest.approx(value, rel=6e-3)
    assert len(text) <= 5


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (65, "1:05"), (7261, "2:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
