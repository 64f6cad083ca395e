"""What the kernels should reach on a CPU with two threads, next to what was measured."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.contract import Record
from benchmarks.kernel_cases import OPERATIONS, Case, usual
from benchmarks.kernel_peers import COMPILED, EAGER, TORCH_FUNCTIONS
from benchmarks.timing import parse_elements

TARGETS = "targets for a CPU with two threads"
ENCODE = usual("encode", 1, "int4", "fp16")


class Target(NamedTuple):
    case: Case
    """Of any number of elements: the target is for the largest size."""
    at_most: float
    """Time over that of the copy."""


OVER_COPY = (
    Target(ENCODE, 1.15),
    *(Target(replace(ENCODE, code=code), 1.3) for code in ("e2m1", "e3m0")),
    *(Target(replace(ENCODE, code=code, rounding="stochastic"), 1.8) for code in ("int4", "e2m1", "e3m0")),
    *(Target(replace(usual("outer_step", 1, "int4", "fp16"), bodies=bodies), 1.1) for bodies in (2, 8)),
    Target(usual("decode_accumulate", 1, "int4", "fp16"), 2.0),
)
OVER_PEERS = {COMPILED: 1 / 4, EAGER: 1 / 20}
EXTRA_MEMORY = 0.01


def target_records(timed: Sequence[Record], peers: Sequence[Record], memory: Sequence[Record]) -> list[Record]:
    """A row a target: what was measured at the largest size, and that over the target."""
    return [*_over_copy(timed), *_over_peers(peers), *_extra_memory(memory)]


def _over_copy(timed: Sequence[Record]) -> list[Record]:
    largest = max(parse_elements(str(r.parameters["elements"])) for r in timed if r.name in OPERATIONS)
    ratios = {(r.name, *r.parameters.values()): r.ratio for r in timed}
    records = []
    for case, at_most in OVER_COPY:
        case = replace(case, elements=largest)
        ratio = ratios[case.operation, *case.parameters.values()]
        assert ratio is not None
        setting = case.rounding or f"K={case.bodies}"
        what = f"{case.operation} {case.code}, {setting}"
        records.append(_record(what, str(case.parameters["elements"]), "time of a copy", at_most, ratio))
    return records


def _over_peers(peers: Sequence[Record]) -> list[Record]:
    return [
        _record(
            f"{operation} int4",
            str(record.parameters["elements"]),
            f"time of {record.parameters['program']}",
            OVER_PEERS[str(record.parameters["program"])],
            1 / record.ratio,
        )
        for operation in TORCH_FUNCTIONS
        for record in peers
        if record.parameters["operation"] == operation and record.parameters["program"] in OVER_PEERS and record.ratio
    ]


def _extra_memory(memory: Sequence[Record]) -> list[Record]:
    return [
        _record(
            f"{record.parameters['operation']} {record.parameters['format']}",
            str(record.parameters["elements"]),
            "its buffers, extra memory",
            EXTRA_MEMORY,
            record.ratio,
        )
        for record in memory
        if record.parameters["scales"] == "fp16" and record.ratio
    ]


def _record(what: str, elements: str, measured_against: str, at_most: float, ratio: float) -> Record:
    parameters: dict[str, object] = {
        "what": what,
        "elements": elements,
        "over": measured_against,
        "target (at most)": at_most,
    }
    return Record(TARGETS, parameters, ratio, "measured", ratio / at_most, "the target")
