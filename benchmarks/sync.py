"""A sync of the main job on the kernels of `dilocox_kernels`, next to the same sync on their plain-torch reference.

Two islands run as `dilocox train` runs them, a process a rank, one thread a rank, with int4 codes over all-gather: the
tiny model, and one of the same kind with 8 layers of 512, whose syncs are long enough that memory counts, on single
ranks. Reference and kernels take turns, the order reversed every time, and the median over the repetitions counts. The
time of a sync is that of the island that comes last: the encoding, the exchange, the vote, the outer step and the
checks.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contract import Record, main
from benchmarks.training import IslandsRun, train_islands

REFERENCE = "the same on kernels=reference"
WIDE = (
    "model.layers=8",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1536",
    "model.heads=8",
    "model.kv_heads=4",
    "island.batch_size=2",
    "island.micro_batch_size=2",
)
MODELS: dict[str, tuple[str, ...]] = {"tiny": (), "wide": WIDE}


class Case(NamedTuple):
    model: str
    island: str
    kernels: str


def run(quick: bool) -> list[Record]:
    """Quick: the tiny model on single ranks, once."""
    pairs = [("tiny", "single")] if quick else [("tiny", "single"), ("tiny", "tp2"), ("wide", "single")]
    length = ["steps=6", "schedule.inner_steps=2"] if quick else ["steps=16", "schedule.inner_steps=2"]
    found: dict[Case, list[IslandsRun]] = {}
    for repetition in range(1 if quick else 3):
        for model, layout in pairs:
            for kernels in ("reference", "auto") if repetition % 2 == 0 else ("auto", "reference"):
                case = Case(model, layout, kernels)
                settings = [*MODELS[model], *length, "islands=2", f"island={layout}", f"kernels={kernels}"]
                found.setdefault(case, []).append(train_islands(settings))
    return [record for model, layout in pairs for record in _records(found, model, layout)]


def _records(found: dict[Case, list[IslandsRun]], model: str, layout: str) -> list[Record]:
    before, after = (found[Case(model, layout, kernels)] for kernels in ("reference", "auto"))
    described: dict[str, object] = {"model": model, "parameters": before[0].parameters, "island": layout}
    slow, fast = _median(before), _median(after)
    return [
        Record("sync", {**described, "kernels": "reference"}, slow, "s", 1.0, REFERENCE),
        Record("sync", {**described, "kernels": "auto"}, fast, "s", fast / slow, REFERENCE),
    ]


def _median(runs: Sequence[IslandsRun]) -> float:
    return statistics.median(run.sync_s for run in runs)


if __name__ == "__main__":
    main("sync", __doc__, run)
