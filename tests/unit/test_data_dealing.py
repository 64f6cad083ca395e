"""Dealing: disjoint, complete, balanced, and a document's shard depends on its id alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.data.dealing import Deal, document_hash
from dilocox.errors import ConfigError

FRACTION = st.floats(0.001, 0.9)
ISLANDS = st.integers(1, 9)
DP = st.integers(1, 5)


def _deal(extra_shards: int, fraction: float, islands: int, dp: int) -> Deal:
    return Deal(10 * (islands * dp + 1) + extra_shards, fraction, islands, dp)


@given(st.integers(0, 500), FRACTION, ISLANDS, DP)
def test_every_shard_has_one_taker_and_shares_are_even(extra: int, fraction: float, islands: int, dp: int) -> None:
    deal = _deal(extra, fraction, islands, dp)
    shares = [deal.training(island, dp_rank) for island in range(islands) for dp_rank in range(dp)]
    taken = [shard for share in (deal.heldout(), *shares) for shard in share]
    assert sorted(taken) == list(range(deal.virtual_shards))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1
    assert len(deal.heldout()) >= 1


@given(st.integers(0, 500), FRACTION, ISLANDS, DP)
def test_what_an_island_trains_on_does_not_depend_on_its_dp(extra: int, fraction: float, islands: int, dp: int) -> None:
    split = _deal(extra, fraction, islands, dp)
    whole = Deal(split.virtual_shards, fraction, islands, 1)
    for island in range(islands):
        parts = {shard for dp_rank in range(dp) for shard in split.training(island, dp_rank)}
        assert parts == set(whole.training(island, 0))


@given(st.integers(0, 500), FRACTION, ISLANDS, ISLANDS)
def test_another_number_of_islands_holds_out_the_same_shards(extra: int, fraction: float, few: int, many: int) -> None:
    deal = _deal(extra, fraction, max(few, many), 1)
    assert deal.heldout() == Deal(deal.virtual_shards, fraction, min(few, many), 1).heldout()


def test_hashes_are_the_same_on_every_machine_and_in_every_version() -> None:
    # A checkpoint's data position, and what is held out, rest on these values.
    assert document_hash("json/decoder.py") == 964254666305710877
    assert document_hash("part-3.jsonl.gz#17") == 7205717719025533190


def test_file_names_that_are_not_unicode_have_a_hash() -> None:
    assert document_hash("caf\udce9.txt") != document_hash("café.txt")


def test_documents_spread_evenly_over_shards() -> None:
    deal = Deal(16, 0.1, 2, 1)
    counts = [0] * 16
    for number in range(1600):
        counts[deal.shard(document_hash(f"doc-{number}.txt"))] += 1
    assert min(counts) > 60
    assert max(counts) < 140


def test_fewer_shards_than_takers_are_refused() -> None:
    assert Deal(9, 0.1, 4, 2).heldout_shards == 1
    with pytest.raises(ConfigError, match=r"data\.virtual_shards=8.*at least 9.*Raise it"):
        Deal(8, 0.1, 4, 2)


@pytest.mark.parametrize(("island", "dp_rank"), [(2, 0), (-1, 0), (0, 1)])
def test_a_rank_outside_the_deal_is_refused(island: int, dp_rank: int) -> None:
    with pytest.raises(ValueError, match="outside 2 islands"):
        Deal(64, 0.1, 2, 1).training(island, dp_rank)
