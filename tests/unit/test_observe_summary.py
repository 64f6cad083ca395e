"""summary.json and loss.png, from the records of whole runs."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.observe.plot import draw_losses, smoothed
from dilocox.observe.reader import read
from dilocox.observe.recorder import Recorder
from dilocox.observe.schema import METRICS_FILE, End, Evaluation, MetricsError, Record
from dilocox.observe.summary import describe, summarise, unfinished, write_summary
from tests import observe_harness as made_up


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return made_up.record_run(made_up.config(tmp_path_factory.mktemp("runs"), "steps=200", "islands=3"))


def test_totals_of_a_run(records: list[Record]) -> None:
    summary = summarise(records)
    assert (summary.islands, summary.steps, summary.rounds) == (3, 200, 4)
    assert summary.tokens == 3 * 200 * 2048
    assert summary.heldout_loss == pytest.approx(np.mean([made_up.loss(200, island) for island in range(3)]))
    assert summary.perplexity == pytest.approx(np.exp(summary.heldout_loss))
    assert summary.untrained_heldout_loss == 5.5
    assert summary.seconds_in_sync == pytest.approx(4 * 0.5)
    assert summary.sync_share == pytest.approx(summary.seconds_in_sync / summary.seconds)
    assert summary.bytes_between_islands == 3 * 4 * 430
    assert summary.bytes_inside_islands == 3 * (4 * 10_000 + 7)
    assert summary.bits_per_parameter_per_sync == pytest.approx(8 * 430 / 800)
    assert summary.parameter_hashes == {0: "cafe", 1: "cafe", 2: "cafe"}
    assert summary.parameters_equal
    assert summary.peak_memory_bytes == {0: [10, 20], 1: [10, 20], 2: [10, 20]}


def test_the_file_holds_the_summary_and_nothing_is_left_beside_it(records: list[Record], tmp_path: Path) -> None:
    summary = summarise(records)
    written = json.loads(write_summary(summary, tmp_path).read_text())
    assert written["heldout_loss"] == summary.heldout_loss
    assert written["parameter_hashes"] == {"0": "cafe", "1": "cafe", "2": "cafe"}
    assert written["versions"]["torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_islands_that_end_apart_are_seen(records: list[Record]) -> None:
    apart = [replace(r, parameter_hash="beef") if isinstance(r, End) and r.island == 1 else r for r in records]
    summary = summarise(apart)
    assert not summary.parameters_equal
    assert "DIFFERENT on 3 islands: beef cafe" in describe(summary)
    assert "the same on 3 islands: cafe" in describe(summarise(records))


def test_an_island_that_has_not_ended_is_named(records: list[Record]) -> None:
    without = [record for record in records if not (isinstance(record, End) and record.island == 2)]
    assert unfinished(without) == [2]
    with pytest.raises(MetricsError, match=r"islands \[2\] have not ended"):
        summarise(without)


def test_a_run_without_held_out_losses_has_no_summary(records: list[Record]) -> None:
    with pytest.raises(MetricsError, match="no held-out loss"):
        summarise([record for record in records if not isinstance(record, Evaluation)])


def test_a_killed_and_resumed_run_sums_up_as_an_unbroken_one(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=100", "islands=1", "island=single")
    with Recorder(config, 0, leader=True) as recorder:
        made_up.start(recorder)
        recorder.evaluation(step=0, round=0, loss=5.5)
        made_up.take_steps(recorder, 0, 1, 99)  # synced and saved at 50; 51 to 99 are lost
    with Recorder(config, 0, leader=True) as recorder:
        made_up.start(recorder)
        recorder.resume(step=50, path="checkpoints/50")
        made_up.take_steps(recorder, 0, 51, 100)
        made_up.end(recorder, 100)
    resumed = summarise(read(config.run_dir / METRICS_FILE))
    whole = summarise(made_up.record_run(replace(config, name="unbroken")))
    timed = {"run": "", "config_hash": "", "seconds": 0.0, "sync_share": 0.0}
    assert replace(resumed, **timed) == replace(whole, **timed)


def test_the_time_between_launches_does_not_count(records: list[Record]) -> None:
    start, *rest = (record for record in records if record.island == 0)
    halves = rest[:300], rest[300:]
    moved = [replace(start, time=1000.0)]
    moved += [replace(record, time=1000.0 + order) for order, record in enumerate(halves[0], 1)]
    moved.append(replace(start, time=5000.0))
    moved += [replace(record, time=5000.0 + order) for order, record in enumerate(halves[1], 1)]
    assert summarise(moved).seconds == len(rest)


def test_the_picture_is_whole_and_shows_the_run(records: list[Record], tmp_path: Path) -> None:
    path = draw_losses(records, tmp_path)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    blue, orange = (np.array(colour) / 255 for colour in ((31, 119, 180), (255, 127, 14)))
    for colour in (blue, orange):
        assert (np.abs(pixels[..., :3] - colour).max(-1) < 0.02).sum() > 300, "a line of an island is missing"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_run_of_many_islands_that_was_stopped_early_can_be_drawn(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=2", "islands=12", "schedule.inner_steps=1")
    for island in range(12):
        with Recorder(config, island, leader=True) as recorder:
            recorder.step(step=1, loss=5.0 + island, lr=1.0, grad_norm=1.0, tokens=7, seconds=0.1)
    assert draw_losses(read(config.run_dir / METRICS_FILE), config.run_dir).stat().st_size > 10_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="no step"):
        draw_losses([], tmp_path)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(1, 50))
def test_smoothing_is_the_mean_of_a_window(losses: list[float], width: int) -> None:
    result = smoothed(losses, width)
    assert len(result) == len(losses)
    for index, value in enumerate(result):
        reach = min(index, width // 2)
        assert value == pytest.approx(np.mean(losses[index - reach : index + reach + 1]), abs=1e-9)
