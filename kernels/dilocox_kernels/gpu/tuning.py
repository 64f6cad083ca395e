"""Which tiling suits a GPU: tried out once a device, operation and format, and kept on disk.

Nothing is tried at import, in the interpreter, or ahead of time: there `fixed_tiling` stands. Results do not depend on
the tiling, but for the last bits of `sum_of_squares`.
"""

import json
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import triton

from dilocox_kernels.formats import GROUP_ELEMENTS, BlockFormat, CastFormat, Format
from dilocox_kernels.gpu.launches import Launch, Tiling
from dilocox_kernels.gpu.samples import Sample
from dilocox_kernels.spans import Spans

TRIAL_ELEMENTS = 1 << 23
"""More bytes than a cache holds; scratch of at most 300 MiB, once."""
_TRIALS = 5
_CANDIDATES = (Tiling(1024, 4), Tiling(2048, 4), Tiling(2048, 8), Tiling(4096, 4), Tiling(4096, 8), Tiling(8192, 8))
_GROUP_CANDIDATES = (Tiling(GROUP_ELEMENTS, 4), Tiling(GROUP_ELEMENTS, 8), Tiling(GROUP_ELEMENTS, 16))

log = logging.getLogger(__name__)


def fixed_tiling(operation: str, fmt: Format) -> Tiling:
    """What needs no trial: 16 elements a thread, but 8 for casts, whose outer step spills a register with 16."""
    if _by_groups(operation, fmt):
        return Tiling(GROUP_ELEMENTS, 8)
    return Tiling(2048, 8) if isinstance(fmt, CastFormat) else Tiling(2048, 4)


@lru_cache(maxsize=256)
def tuned_tiling(operation: str, fmt: Format, device: torch.device) -> Tiling:
    """The fastest tiling on this GPU, from disk or tried out now (seconds, scratch on the GPU) and written there."""
    path = cache_path()
    key = f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}, {operation}, {fmt.name}"
    known = _read(path)
    if key not in known:
        candidates = _GROUP_CANDIDATES if _by_groups(operation, fmt) else _CANDIDATES
        sample = Sample(operation, fmt)
        launches = sample.launches(Spans.whole(TRIAL_ELEMENTS), device)
        seconds = {tiling: _seconds(launches, tiling, device) for tiling in candidates}
        best = min(seconds, key=seconds.__getitem__)
        known = _read(path) | {key: [best.tile, best.num_warps]}
        _write(path, known)
        log.info("tried %d tilings for %s: %s; kept in %s", len(seconds), key, best, path)
    return Tiling(*known[key])


def cache_path() -> Path:
    """The file of choices: in $DILOCOX_CACHE, or ~/.cache/dilocox."""
    folder = os.environ.get("DILOCOX_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "dilocox") / "tilings.json"


def _by_groups(operation: str, fmt: Format) -> bool:
    """Whether blocks of a tile have to share one base: tiles are groups then."""
    return isinstance(fmt, BlockFormat) and fmt.shares_base and operation in ("encode", "requantise")


def _seconds(launches: Callable[[Tiling], list[Launch]], tiling: Tiling, device: torch.device) -> float:
    """The shortest of some runs, after one that compiles."""
    times = []
    with torch.cuda.device(device):
        for _ in range(1 + _TRIALS):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started = launches(tiling)
            before.record()
            for launch in started:
                launch.run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1000)
    return min(times[1:])


def _read(path: Path) -> dict[str, list[int]]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def _write(path: Path, known: dict[str, list[int]]) -> None:
    """Beside, then renamed: processes that tune at the same time see whole files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    beside.replace(path)
