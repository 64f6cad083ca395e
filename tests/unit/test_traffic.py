"""Predicted bytes between islands: equal to what syncs count, and to the formulas of the exchanges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config import load_config
from dilocox.method import build_roles
from dilocox.outer.exchange.all_gather import AllGather
from dilocox.outer.exchange.reduce_scatter import ReduceScatter
from dilocox.outer.sync import SyncReport
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.parameters import holdings
from dilocox.traffic import VOTE_BYTES, predict_between, rehearse
from dilocox_kernels.wire import HEADER_BYTES
from tests.outer_harness import FP32, INT4, outer_loop, roles, run_islands, step

VOCAB = 257
SMALL = ["island=single", "device=cpu", "steps=4", "schedule.inner_steps=2", "model.hidden_size=64", "model.layers=2"]
EXCHANGES = {"all_gather": AllGather, "reduce_scatter": ReduceScatter}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("islands", [1, 2, 3])
def test_prediction_equals_what_syncs_report(islands: int, codec: str, exchange: str) -> None:
    config = load_config([*SMALL, f"islands={islands}", f"codec={codec}", f"exchange={exchange}"])
    (lane,) = config.island.layout.lanes()
    sizes = [holding.numel for holding in holdings(config, VOCAB, lane)]
    chosen = build_roles(config)

    def run(island: int, group: LaneGroup) -> list[SyncReport]:
        weights = [torch.ones(size) for size in sizes]
        loop = outer_loop(weights, chosen, group)
        return [report for s in range(config.steps) for report in step(loop, weights, island, s)]

    predicted = predict_between(config, VOCAB)
    for island, reports in enumerate(run_islands(islands, run)):
        assert len(reports) == predicted.syncs == 2
        for report in reports:
            assert report.bytes_sent == predicted.sent[lane][island] == predicted.bytes_per_sync(island)
            assert report.elements == predicted.parameters
    assert predicted.bits_per_parameter == 8 * predicted.bytes_per_sync(0) / predicted.parameters


@given(blocks=st.integers(0, 300), islands=st.integers(1, 5), codec=st.sampled_from([FP32, INT4]))
def test_bytes_follow_the_formulas(blocks: int, islands: int, codec: object) -> None:
    """All-gather sends K−1 times the codes, reduce-scatter 2(K−1)/K times, over all islands; framing is added."""
    numel = 32 * blocks
    for exchange in (AllGather(), ReduceScatter()):
        chosen = roles(codec=codec, exchange=exchange)
        found = [rehearse(numel, chosen, island, islands) for island in range(islands)]
        hops = exchange.hops
        framing = (islands - 1) * (hops * HEADER_BYTES + VOTE_BYTES)
        encoded = chosen.codec.encoded_bytes(numel)
        share = 1 if hops == 1 else 2 / islands
        assert sum(r.bytes_sent for r in found) == islands * framing + round(islands * (islands - 1) * share * encoded)


def test_reduction_against_synchronous_training() -> None:
    """int4 at block 64 is 4.25 bits: with H steps a sync, H · 32 · 2(K−1)/K / (4.25 · what the exchange sends)."""
    for islands, exchange, sent in [(2, "all_gather", 1.0), (4, "all_gather", 3.0), (4, "reduce_scatter", 1.5)]:
        config = load_config(["experiment=125m", f"islands={islands}", f"exchange={exchange}"])
        found = predict_between(config, 32_000)
        assert found.reduction == pytest.approx(100 * 32 * 2 * (islands - 1) / islands / (4.25 * sent), rel=2e-3)
        assert found.bits_per_parameter == pytest.approx(4.25 * sent, rel=2e-3)
        assert found.bytes_total == found.syncs * sum(found.bytes_per_sync(i) for i in range(islands))


def test_one_island_sends_nothing() -> None:
    found = predict_between(load_config([*SMALL, "islands=1"]), VOCAB)
    assert found.bytes_total == 0
    assert found.reduction == float("inf")
