"""Bytes of real syncs between islands of one process, over the formulas of the exchanges and over synchronous training.

The bytes are those that the transport counted: codes, scales, headers and votes.
"""

from collections.abc import Sequence

import torch

from benchmarks.contract import Record
from benchmarks.plain import PlainGPT
from dilocox.config import Config, load_config
from dilocox.data.tokenizer import build_tokenizer
from dilocox.launchers.inprocess import run_in_turns
from dilocox.method import build_roles
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.modules import shards_of
from dilocox.outer.transport.protocol import LaneGroup

EXCHANGES = ("all_gather", "reduce_scatter")
FP32_BYTES = 4


def exchange_records(codecs: Sequence[str], island_counts: Sequence[int]) -> list[Record]:
    """A sync of each codec over each exchange between each number of islands."""
    records = []
    for codec in codecs:
        for islands in island_counts:
            for exchange in EXCHANGES:
                config = load_config([f"islands={islands}", f"codec={codec}", f"exchange={exchange}"])
                records += _records(config, codec, exchange)
    return records


def _records(config: Config, codec: str, exchange: str) -> list[Record]:
    islands, inner_steps = config.islands, config.schedule["inner_steps"]
    sent, parameters = sync_bytes(config)
    codes = build_roles(config).codec.encoded_bytes(parameters)
    copies, formula = _copies(exchange, islands)
    all_reduce = ring(islands) * FP32_BYTES * parameters
    settings: dict[str, object] = {"codec": codec, "islands": islands, "exchange": exchange}
    return [
        Record("bytes in a sync by exchange", settings, sent, "B", sent / (copies * codes), f"{formula} × codes"),
        Record(
            "bytes in an inner step by exchange",
            {**settings, "inner_steps": inner_steps},
            sent / inner_steps,
            "B",
            sent / inner_steps / all_reduce,
            "fp32 ring all-reduce in every step",
        ),
    ]


def ring(islands: int) -> float:
    """What one of `islands` sends in a ring all-reduce, in copies of the data."""
    return 2 * (islands - 1) / islands


def _copies(exchange: str, islands: int) -> tuple[float, str]:
    """How many copies of its codes an island should send, and the formula."""
    return (islands - 1, "(K−1)") if exchange == "all_gather" else (ring(islands), "2(K−1)/K")


def sync_bytes(config: Config) -> tuple[int, int]:
    """Bytes that the island that sends most has sent after one sync, and the model's parameters."""
    sent = [0] * config.islands
    vocab_size = build_tokenizer(config.data.tokenizer).vocab_size
    parameters = sum(p.numel() for p in PlainGPT(config.model, vocab_size).parameters())

    def body(island: int, lane_group: LaneGroup) -> None:
        torch.manual_seed(config.seed)
        model = PlainGPT(config.model, vocab_size)
        outer = OuterLoop(
            shards_of(model),
            roles=build_roles(config),
            lane_group=lane_group,
            island_group=IslandGroup(None, torch.device("cpu")),
            identity={},
            kernels=config.kernels.value,
        )
        generator = torch.Generator().manual_seed(island)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        reports = [outer.after_update(Progress(steps=1)) for _ in range(config.schedule["inner_steps"])]
        sent[island] = sum(report.bytes_sent for of_step in reports for report in of_step)

    run_in_turns(config.islands, "exchanges", body)
    return max(sent), parameters
