"""The memory estimate: its committed table, its limits, and what makes it larger or smaller."""

from pathlib import Path

import pytest

from dilocox.activations import in_flight
from dilocox.config import load_config
from dilocox.memory import EXPERIMENTS, GPU_BYTES, TABLE_VOCAB, estimate, table
from dilocox.parameters import holdings, total_parameters

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def test_committed_table_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text() == table(), "run: python -m dilocox.memory > docs/models.md"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_fits_an_80_gb_gpu(name: str) -> None:
    assert estimate(load_config([f"experiment={name}"]), TABLE_VOCAB).device < 0.9 * GPU_BYTES


@pytest.mark.parametrize(
    ("name", "published"), [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)]
)
def test_llama_2_has_its_published_number_of_parameters(name: str, published: int) -> None:
    assert total_parameters(load_config([f"model={name}"]).model, 32_000) == published


@pytest.mark.parametrize("name", ["350m", "1.3b", "70b"])
def test_lanes_hold_the_whole_model_once(name: str) -> None:
    config = load_config([f"experiment={name}"])
    held = (h for lane in config.island.layout.lanes() for h in holdings(config, 32_000, lane))
    assert sum(h.numel / h.replicas for h in held) == total_parameters(config.model, 32_000)


def test_recomputation_keeps_less() -> None:
    kept = [
        estimate(load_config(["experiment=70b", f"island.recompute={mode}"]), TABLE_VOCAB).activations
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2]


def test_host_state_leaves_the_device() -> None:
    on_device, on_host = (
        estimate(load_config(["experiment=7b", f"outer_state_device={place}"]), TABLE_VOCAB)
        for place in ("same", "host")
    )
    assert on_device.static - on_host.static == on_device.outer_state == on_host.outer_state
    assert on_host.host - on_device.host == on_host.outer_state + on_host.sync


def test_first_stage_holds_most_microbatches() -> None:
    plain = load_config(["experiment=70b"])
    assert [in_flight(plain, stage) for stage in range(4)] == [4, 3, 2, 1]
    interleaved = load_config(["experiment=70b", "island.virtual_pp=2"])
    assert [in_flight(interleaved, stage) for stage in range(4)] == [11, 9, 7, 5]
    few = load_config(["experiment=70b", "island.batch_size=4"])
    assert in_flight(few, 0) == 2


def test_a_step_without_outer_state_needs_none() -> None:
    needed = estimate(load_config(["algo=sync_dp", "device=cpu"]), 256)
    assert needed.outer_state == 0
    assert needed.device > needed.static > 0
