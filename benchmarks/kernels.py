"""The kernels' time next to a copy of the same bytes and next to peers; their memory; what the formats lose.

A ratio over a copy is the time of an operation over that of `copy_` moving as many bytes as the operation must (each
read or written once; `bytes_moved` in benchmarks/kernel_cases.py has the formulas): 1.00 is the speed of memory. Its
inverse, the share of the copy's speed, is in the picture. Kernel and copy, and all peers, take turns in one run, the
order reversed every time, and medians count. A call goes through the front with its checks. Blocks have 64 elements;
weights and residual are bf16 (usual on a GPU, and what the targets are for) or fp32 (the main job on CPUs), the anchor
and the momentum fp32; the outer step is Nesterov with the local weights overwritten.

Peers: a plain eager implementation in torch (benchmarks/kernel_peers.py), the same under torch.compile, compiled
before it is timed, and libraries, which only quantise an fp32 tensor. Extra memory is the growth of the peak while an
operation runs on buffers that are in memory already, in a process of its own; the second residual is such a buffer.

Relative errors are ‖Δ − decoded‖ / ‖Δ‖ of one encode (the middle round's), and ‖Σ sent − Σ Δ‖ / ‖Σ Δ‖ over rounds in
which an fp32 residual carries on what was not sent. Δ is new every round: normal, Student's t with 3 degrees of
freedom, or the pseudo-gradients of the main job's tiny model (two islands, H=25, int4), recorded in this run.
"""

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

from benchmarks import kernel_peers, kernel_targets, pseudo_gradients, quality, roofline
from benchmarks.contract import Record, command_line, measure
from benchmarks.kernel_cases import (
    CODES,
    OPERATIONS,
    SCALES,
    Buffers,
    Case,
    bytes_held,
    bytes_moved,
    grid,
    select_kernels,
    usual,
    work_of,
)
from benchmarks.kernel_memory import extra_bytes
from benchmarks.timing import COPY_BYTES_AT_MOST, Copy, Work, in_words, parse_elements, take_turns
from dilocox_kernels.kernels import Kernels

SIZES, QUICK_SIZES = ("1M", "16M", "64M"), ("1M", "4M")
PEERS_AT_MOST = parse_elements("16M")
COPY = "copy_ of the same bytes"
OURS = "dilocox_kernels"
PEERS, MEMORY = "peers", "extra memory at the peak"


def about() -> str:
    """The docstring, and what takes part on this machine."""
    notes = [*kernel_peers.library_quantisers()[1], kernel_peers.torchft_fp8()[1], kernel_peers.compiler()[1]]
    device = "On a GPU, with CUDA events." if torch.cuda.is_available() else _without_gpu()
    return f"{__doc__}\nHere: {device} Peers: {'; '.join(notes)}."


def _without_gpu() -> str:
    return f"{torch.get_num_threads()} CPU threads. For GPUs there is the byte model only (the last table)."


def run(quick: bool, sizes: Sequence[int]) -> list[Record]:
    device = _device()
    kernels = select_kernels(device)
    budget_s = 0.08 if quick else 1.5
    largest = max(sizes)
    timed = _kernel_records(kernels, sizes, device, budget_s)
    peers = _peer_records(kernels, min(largest, PEERS_AT_MOST), device, budget_s)
    memory = _memory_records(largest, SCALES[:1] if quick else SCALES, device)
    targets = [] if device.type == "cuda" else kernel_targets.target_records(timed, peers, memory)
    return [*targets, *_quality_records(kernels, quick, device), *timed, *peers, *memory, *_byte_model_records(largest)]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_fits(sizes: Sequence[int], device: torch.device) -> None:
    """Raise ValueError for sizes whose buffers would not fit into the free memory of the device."""
    cases = grid(sizes)
    needed = max(bytes_held(case) + min(bytes_moved(case), COPY_BYTES_AT_MOST) for case in cases)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_bytes()
    if needed > free:
        raise ValueError(
            f"--sizes up to {in_words(max(sizes))} need {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
            "choose smaller ones"
        )


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _kernel_records(kernels: Kernels, sizes: Sequence[int], device: torch.device, budget_s: float) -> list[Record]:
    """All cases of the grid, and the speed of the copies beside them, by operation and size."""
    records: list[Record] = []
    speeds: dict[int, list[float]] = {}
    in_order = sorted(grid(sizes), key=lambda case: (OPERATIONS.index(case.operation), case.elements, str(case.dtype)))
    for (_, elements, _), cases in groupby(in_order, key=lambda case: (case.operation, case.elements, case.dtype)):
        buffers: Buffers | None = None
        for case in cases:
            buffers = buffers or Buffers(case, device)
            copy = Copy(bytes_moved(case), device)
            times = take_turns({OURS: work_of(kernels, case, buffers), COPY: copy}, device, budget_s)
            copied_s = times[COPY] * copy.factor
            records.append(Record(case.operation, case.parameters, times[OURS], "s", times[OURS] / copied_s, COPY))
            speeds.setdefault(elements, []).append(bytes_moved(case) / copied_s)
    copies = [
        Record("speed of a copy, read and written", {"elements": in_words(elements)}, speed / 1e9, "GB/s", None, None)
        for elements, speed in ((elements, statistics.median(found)) for elements, found in speeds.items())
    ]
    return [*copies, *records]


def _peer_records(kernels: Kernels, elements: int, device: torch.device, budget_s: float) -> list[Record]:
    """Seconds of all that do the same as an operation (or, libraries, less), over those of the kernel."""
    records = []
    for case in _usual_cases(elements, ("encode", "decode_accumulate", "outer_step"), SCALES[:1]):
        buffers = Buffers(case, device)
        works: dict[str, Work] = {OURS: work_of(kernels, case, buffers)}
        works |= kernel_peers.torch_works(case, buffers, buffers.bodies(kernels, case))
        if case.operation == "encode":
            works |= kernel_peers.library_works(buffers.anchor)
        times = take_turns(works, device, 4 * budget_s)
        for program, seconds in times.items():
            parameters: dict[str, object] = {
                "operation": case.operation,
                "elements": in_words(elements),
                "program": program,
            }
            records.append(Record(PEERS, parameters, seconds, "s", seconds / times[OURS], OURS))
    return records


def _memory_records(elements: int, scales: Sequence[str], device: torch.device) -> list[Record]:
    cases = _usual_cases(elements, OPERATIONS, scales)
    return [
        Record(
            MEMORY,
            {"operation": case.operation, "elements": in_words(elements), "format": case.code, "scales": case.scale},
            extra,
            "B",
            extra / bytes_held(case),
            "the buffers",
        )
        for case, extra in zip(cases, extra_bytes(cases, device), strict=True)
    ]


def _usual_cases(elements: int, operations: Sequence[str], scales: Sequence[str]) -> list[Case]:
    """int4 in its usual setting."""
    return [usual(operation, elements, "int4", scale) for operation in operations for scale in scales]


def _quality_records(kernels: Kernels, quick: bool, device: torch.device) -> list[Record]:
    elements, rounds = (1 << 18, 8) if quick else (1 << 20, 50)
    data = {
        "normal": quality.gaussian(elements, rounds),
        "Student's t, 3 degrees": quality.heavy_tailed(elements, rounds),
        "pseudo-gradients": pseudo_gradients.record(rounds),
    }
    on_device = {kind: [delta.to(device) for delta in deltas] for kind, deltas in data.items()}
    return quality.quality_records(kernels, kernel_peers.library_quantisers()[0], on_device)


def _byte_model_records(elements: int) -> list[Record]:
    """Bytes an element that each operation must move, in the usual setting of each format."""
    cases = [usual(operation, elements, code, "fp16") for operation in OPERATIONS for code in CODES]
    return [
        Record(
            "bytes an element that must move",
            {"operation": case.operation, "format": case.code, "scales": case.scale, "K": case.bodies or "–"},
            bytes_moved(case) / elements,
            "B an element",
            None,
            None,
        )
        for case in cases
    ]


if __name__ == "__main__":
    parser = command_line("kernels", about())
    parser.add_argument(
        "--sizes",
        nargs="+",
        metavar="SIZE",
        help=f"elements, such as 1G (powers of 1024); default: {' '.join(SIZES)}, if quick {' '.join(QUICK_SIZES)}",
    )
    arguments = parser.parse_args()
    try:
        sizes = [parse_elements(size) for size in arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES)]
        check_fits(sizes, _device())
    except ValueError as error:
        parser.error(str(error))
    measure("kernels", about(), arguments, lambda quick: run(quick, sizes), roofline.draw)
