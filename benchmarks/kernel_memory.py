"""Memory that an operation takes besides its buffers, at its peak."""

import gc
import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.kernel_cases import Buffers, Case, select_kernels, work_of
from benchmarks.timing import Work

WARM_UP_ELEMENTS = 1 << 20
PROCESS = Path("/proc/self")


def extra_bytes(cases: Sequence[Case], device: torch.device) -> list[int]:
    """By case: how far the peak grows while the operation runs on buffers that are all in memory already.

    Each is measured in a process of its own: what another operation has freed there would not be seen as growth. A
    residual is written beside the old one, so the second is a buffer.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(_measure, cases, [device] * len(cases)))


def _measure(case: Case, device: torch.device) -> int:
    kernels = select_kernels(device)
    warm_up = replace(case, elements=min(WARM_UP_ELEMENTS, case.elements))
    work_of(kernels, warm_up, Buffers(warm_up, device))()  # loads libraries, starts threads
    work = work_of(kernels, case, Buffers(case, device))
    gc.collect()
    return peak_growth(work, device)


def peak_growth(work: Work, device: torch.device) -> int:
    """Bytes by which the memory of this process (on a GPU: torch's) grows at most during one call; at least a page.

    Linux counts the pages of each thread in batches: up to 64 pages a thread may go unseen.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return max(torch.cuda.max_memory_allocated(device) - before, resource.getpagesize())
    (PROCESS / "clear_refs").write_text("5")  # the peak starts anew at what is resident now
    before = _status("VmHWM")
    work()
    return max(_status("VmHWM") - before, resource.getpagesize())


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status, which is in KiB."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
