"""What `--dry-run` prints: every rank, every lane group, and the numbers of the predictions."""

import re

from dilocox.config import load_config
from dilocox.data.tokenizer import build_tokenizer
from dilocox.dry_run import describe
from dilocox.memory import GIB, estimate
from dilocox.traffic import predict_between


def seats(text: str) -> dict[str, list[str]]:
    """Rows of the table of ranks, by lane."""
    rows = re.findall(r"^\d+ +tp\d.*$", text, flags=re.MULTILINE)
    return {row.split()[1]: re.split(r" {2,}", row) for row in rows}


def test_every_rank_has_its_seat_and_its_partners() -> None:
    text = describe(
        load_config(["device=cpu", "island=tp2pp2", "island.dp=2", "island.micro_batch_size=2", "islands=3"])
    )
    found = seats(text)
    assert list(found) == [f"tp{tp}-pp{pp}-dp{dp}" for pp in range(2) for dp in range(2) for tp in range(2)]
    rank, _, _, tensor, pipeline, data, lane_group = found["tp1-pp0-dp1"]
    assert (rank, tensor, pipeline, data) == ("3", "2", "7", "1")
    assert lane_group == "0:3 1:3 2:3"


def test_interleaving_and_tied_embeddings_join_the_ends_of_the_pipeline() -> None:
    settings = ["device=cpu", "island=pp2", "island.pp=4", "island.batch_size=16"]
    assert seats(describe(load_config(settings)))["tp0-pp0-dp0"][4] == "1,3"
    untied = [*settings, "model.tied_embeddings=false"]
    assert seats(describe(load_config(untied)))["tp0-pp0-dp0"][4] == "1"
    interleaved = [*untied, "island.virtual_pp=2", "model.layers=8"]
    assert seats(describe(load_config(interleaved)))["tp0-pp3-dp0"][4] == "0,2"


def test_numbers_are_those_of_the_predictions() -> None:
    config = load_config(["device=cpu", "codec=int8", "islands=3", "exchange=reduce_scatter"])
    vocab_size = build_tokenizer(config.data.tokenizer).vocab_size
    between, memory, text = predict_between(config, vocab_size), estimate(config, vocab_size), describe(config)
    assert f"{between.parameters:,} parameters" in text
    assert f"{between.bits_per_parameter:.3f} bits a parameter" in text
    assert f"{between.bytes_per_sync(1) / 1e6:.2f} MB" in text
    assert re.search(rf"^peak +{memory.device / GIB:.3f}$", text, flags=re.MULTILINE)
    assert "20 syncs in 500 inner steps" in text
    assert "6,144 tokens a step" in text


def test_islands_in_one_process_and_on_gpus() -> None:
    text = describe(load_config(["experiment=70b", "launcher=inprocess"]))
    assert "64 processes; in each, its lane of all 2 islands take turns" in text
    assert "bf16 with fp32 main weights, on GPUs" in text
    assert len(seats(text)) == 64


def test_one_island_is_said_to_send_nothing() -> None:
    assert "one island sends nothing" in describe(load_config(["device=cpu", "islands=1"]))


def test_lines_fit_a_wide_terminal() -> None:
    assert max(map(len, describe(load_config(["device=cpu"])).splitlines())) <= 120
