"""Ranks and lanes of a layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.topology import Lane, Layout

layouts = st.builds(Layout, tp=st.integers(1, 8), pp=st.integers(1, 8), dp=st.integers(1, 8))


@given(layouts)
def test_ranks_and_lanes_are_one_to_one(layout: Layout) -> None:
    lanes = list(layout.lanes())
    assert len(set(lanes)) == layout.world_size
    assert [layout.rank(lane) for lane in lanes] == list(range(layout.world_size))
    assert all(lane.tp < layout.tp and lane.pp < layout.pp and lane.dp < layout.dp for lane in lanes)


def test_tensor_parallel_ranks_are_neighbours_then_data_then_pipeline() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    assert [layout.rank(lane) for lane in (Lane(1, 0, 0), Lane(0, 0, 1), Lane(0, 1, 0))] == [1, 2, 8]


@pytest.mark.parametrize("rank", [-1, 24])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside an island of 24"):
        Layout(tp=2, pp=3, dp=4).lane(rank)


def test_a_lane_says_where_it_is() -> None:
    assert str(Lane(tp=1, pp=0, dp=3)) == "tp1-pp0-dp3"
