"""The inner learning rate: warm-up, decay, and where it ends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config import Decay
from dilocox.islands.inner_schedule import InnerSchedule


def schedule(decay: Decay, *, warmup_steps: int = 10, decay_steps: int = 110) -> InnerSchedule:
    return InnerSchedule(lr=2.0, min_lr_ratio=0.1, warmup_steps=warmup_steps, decay=decay, decay_steps=decay_steps)


@pytest.mark.parametrize("decay", Decay)
def test_warm_up_is_linear_and_reaches_the_rate(decay: Decay) -> None:
    assert [schedule(decay).at(step) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize(
    ("decay", "quarter", "half", "end"),
    [
        (Decay.constant, 2.0, 2.0, 2.0),
        (Decay.linear, 0.2 + 0.75 * 1.8, 1.1, 0.2),
        (Decay.cosine, 0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2, 1.1, 0.2),
    ],
)
def test_decay(decay: Decay, quarter: float, half: float, end: float) -> None:
    rates = [schedule(decay).at(step) for step in (35, 60, 110, 111, 10_000)]
    assert rates == pytest.approx([quarter, half, end, end, end])


def test_without_warm_up_the_first_step_has_almost_the_full_rate() -> None:
    assert schedule(Decay.linear, warmup_steps=0, decay_steps=100).at(1) == pytest.approx(2.0 - 1.8 / 100)


def test_a_warm_up_longer_than_the_decay_ends_at_the_lowest_rate() -> None:
    longer = schedule(Decay.cosine, warmup_steps=50, decay_steps=20)
    assert longer.at(50) == pytest.approx(2.0)
    assert longer.at(51) == pytest.approx(0.2)


@given(
    decay=st.sampled_from(Decay),
    warmup_steps=st.integers(0, 100),
    decay_steps=st.integers(1, 300),
    step=st.integers(1, 500),
)
def test_the_rate_stays_within_its_bounds_and_never_rises_after_warm_up(
    decay: Decay, warmup_steps: int, decay_steps: int, step: int
) -> None:
    one = schedule(decay, warmup_steps=warmup_steps, decay_steps=decay_steps)
    assert 0 < one.at(step) <= one.lr
    if step > warmup_steps:
        assert one.at(step) >= one.lr * one.min_lr_ratio * (1 - 1e-12)
        assert one.at(step + 1) <= one.at(step)
