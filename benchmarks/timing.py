"""Times of pieces of work that take turns on one device, the copy that they are compared with, and sizes in words."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]
COPY_BYTES_AT_MOST = 2 << 30
"""What a copy moves (reads and writes) at once; a longer one goes on at the same speed."""
FEWEST, MOST = 3, 51
"""Repetitions."""
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def take_turns(works: Mapping[str, Work], device: torch.device, budget_s: float) -> dict[str, float]:
    """Median seconds of each work: all in turn, the order reversed every time, for about `budget_s` seconds.

    The first call of each, which may compile and fault pages in, does not count.
    """
    for work in works.values():
        work()
    once = sum(seconds(work, device) for work in works.values())
    repetitions = min(max(round(budget_s / once), FEWEST), MOST)
    measured: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(repetitions):
        for name in list(works) if repetition % 2 == 0 else reversed(list(works)):
            measured[name].append(seconds(works[name], device))
    return {name: statistics.median(times) for name, times in measured.items()}


def seconds(work: Work, device: torch.device) -> float:
    """Of one call: the wall clock on a CPU, CUDA events on a GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Copy:
    """`copy_` that moves as many bytes as another work does, half of them read and half written."""

    def __init__(self, moved_bytes: int, device: torch.device) -> None:
        at_once = min(moved_bytes, COPY_BYTES_AT_MOST)
        self.factor = moved_bytes / at_once
        """What the seconds of one call count for."""
        self._source = torch.zeros(at_once // 8, device=device)  # fp32: half the bytes, four an element
        self._target = torch.zeros_like(self._source)

    def __call__(self) -> None:
        self._target.copy_(self._source)


def parse_elements(text: str) -> int:
    """`16M` as a number of elements (powers of 1024); raises ValueError for anything else."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"size {text!r}: expected a whole number and one of {', '.join(UNITS)}, such as 16M")
    return int(number) * UNITS[unit]


def in_words(elements: int) -> str:
    """1 << 24 as `16M`; the exact inverse of `parse_elements`."""
    unit = max((unit for unit, size in UNITS.items() if elements % size == 0), key=UNITS.__getitem__)
    return f"{elements // UNITS[unit]}{unit}"
