"""The main job's time, memory and bytes, next to the same model trained by plain torch in one process.

Two islands run as `dilocox train` runs them, a process a rank, once as two tensor parallel ranks each and once as one
rank each, with every codec, exchanging all-gather; the tiny model, a batch of 16 sequences an island, one thread a
rank. Plain torch trains the same model on the same batches with torch's fused AdamW, on one thread too. All runs
repeat in turn, the order reversed every time, and the median over the repetitions counts.

On a machine with fewer cores than ranks the ranks share cores, and a step takes as much longer. The time of a sync is
that of the island that comes last: the encoding, the exchange, the outer step and the checks, without the wait for
islands that are behind. Memory of a process on a CPU is all that is resident, the Python modules included. Bytes are
what one island sends in a sync, headers included; islands of one process count them as islands apart do.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.contract import Record, main
from benchmarks.exchanges import FP32_BYTES, exchange_records
from benchmarks.training import IslandsRun, PlainRun, train_islands, train_plain

PLAIN_STEP = "inner step in plain torch"
PLAIN_MEMORY = "peak memory in plain torch"


class Case(NamedTuple):
    island: str
    codec: str

    @property
    def parameters(self) -> dict[str, object]:
        return {"island": self.island, "codec": self.codec}


def run(quick: bool) -> list[Record]:
    codecs = ("int4",) if quick else ("fp32", "bf16", "int8", "int4")
    layouts = ("tp2",) if quick else ("tp2", "single")
    length = ["steps=6", "schedule.inner_steps=2"] if quick else ["steps=40", "schedule.inner_steps=4"]
    plain: list[PlainRun] = []
    islands: dict[Case, list[IslandsRun]] = {Case(layout, codec): [] for layout in layouts for codec in codecs}
    for repetition in range(1 if quick else 3):
        plain.append(train_plain([*length, "islands=2"]))
        for case in list(islands) if repetition % 2 == 0 else reversed(islands):
            islands[case].append(train_islands([*length, "islands=2", f"island={case.island}", f"codec={case.codec}"]))
    _check_same_model(plain, islands)
    counts = (2, 4) if quick else (2, 4, 8)
    return [
        *_step_records(plain, islands),
        *_sync_records(plain, islands),
        *_memory_records(plain, islands),
        *_byte_records(islands),
        *exchange_records(("fp32", "int4"), counts),
    ]


def _check_same_model(plain: Sequence[PlainRun], islands: dict[Case, list[IslandsRun]]) -> None:
    sizes = {found.parameters for found in plain} | {found.parameters for runs in islands.values() for found in runs}
    if len(sizes) > 1:
        raise RuntimeError(f"the runs do not train the same model: it has {sorted(sizes)} parameters")


def _step_records(plain: Sequence[PlainRun], islands: dict[Case, list[IslandsRun]]) -> list[Record]:
    """A codec does nothing in an inner step: its runs count together."""
    reference = statistics.median(found.step_s for found in plain)
    records = [Record(PLAIN_STEP, {"ranks": 1}, reference, "s", None, None)]
    for layout in dict.fromkeys(case.island for case in islands):
        value = _median(
            [found for case, runs in islands.items() if case.island == layout for found in runs], lambda r: r.step_s
        )
        records.append(Record("inner step", {"island": layout}, value, "s", value / reference, PLAIN_STEP))
    return records


def _sync_records(plain: Sequence[PlainRun], islands: dict[Case, list[IslandsRun]]) -> list[Record]:
    reference = statistics.median(found.step_s for found in plain)
    values = {case: _median(runs, lambda r: r.sync_s) for case, runs in islands.items()}
    return [
        Record("sync", case.parameters, value, "s", value / reference, PLAIN_STEP) for case, value in values.items()
    ]


def _memory_records(plain: Sequence[PlainRun], islands: dict[Case, list[IslandsRun]]) -> list[Record]:
    reference = statistics.median(found.peak_memory_bytes for found in plain) / 1e6
    values = {case: _median(runs, lambda r: r.peak_memory_bytes) / 1e6 for case, runs in islands.items()}
    return [
        Record(PLAIN_MEMORY, {"ranks": 1}, reference, "MB", None, None),
        *(
            Record("peak memory a rank", case.parameters, value, "MB", value / reference, PLAIN_MEMORY)
            for case, value in values.items()
        ),
    ]


def _byte_records(islands: dict[Case, list[IslandsRun]]) -> list[Record]:
    """These are the same in every repetition."""
    first = {case: runs[0] for case, runs in islands.items()}
    return [
        *(
            Record(
                "bytes sent in a sync",
                case.parameters,
                found.bytes_sent,
                "B",
                found.bytes_sent / (FP32_BYTES * found.parameters),
                "the parameters in fp32",
            )
            for case, found in first.items()
        ),
        *(
            Record(
                "bits a parameter in a sync",
                case.parameters,
                8 * found.bytes_sent / found.parameters,
                "bit",
                None,
                None,
            )
            for case, found in first.items()
        ),
    ]


def _median(runs: Sequence[IslandsRun], measure: Callable[[IslandsRun], float]) -> float:
    return statistics.median(measure(found) for found in runs)


if __name__ == "__main__":
    main("first", __doc__, run)
