"""The Triton kernels, compiled ahead of time for GPUs that are not here: docs/kernels-compiled.md, and what it claims.

What compiles runs in a process of its own: not in the interpreter, and with an empty cache.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kernels-compiled.md"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
HOT = ("encode", "outer_step")


@pytest.fixture
def rows() -> list[dict[str, str]]:
    """The table of the committed page, which the first test holds to the kernels."""
    lines = [line for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in body]


def test_the_page_is_what_the_generator_writes(tmp_path: Path, rewrite_golden: bool) -> None:
    page = _python(tmp_path, "-m", "dilocox_kernels.gpu.report")
    if rewrite_golden:
        PAGE.write_text(page)
    assert page == PAGE.read_text()


def test_every_kernel_is_compiled_for_every_target(rows: list[dict[str, str]]) -> None:
    kernels = {row["kernel"] for row in rows}
    assert {name.split(",")[0] for name in kernels} == {"encode", "requantise", "decode_accumulate", "outer_step"}
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (name, target) for name in kernels for target in TARGETS
    }


def test_nothing_is_spilled_over_whole_tiles(rows: list[dict[str, str]]) -> None:
    whole = [row for row in rows if "cut tiles" not in row["kernel"]]
    assert {row["spilled"] for row in whole} == {"0"}


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("target", TARGETS)
def test_big_streams_move_sixteen_bytes_at_once(rows: list[dict[str, str]], name: str, target: str) -> None:
    (row,) = [row for row in rows if row["kernel"] == name and row["target"] == target]
    elements, threads = 2048, 4 * (64 if target == "gfx942" else 32)
    # Streams of 16-byte accesses, in bytes an element: anchor, weights and residual; or anchor and momentum.
    read, written = {"encode": (4 + 2 + 2, 2), "outer_step": (4 + 4, 4 + 4)}[name]
    assert _accesses(row["loads"])[16] == elements * read // (16 * threads)
    assert _accesses(row["stores"])[16] == elements * written // (16 * threads)


def test_without_the_interpreter_a_cpu_is_refused(tmp_path: Path) -> None:
    code = (
        "from dilocox_kernels.backend import BackendError\n"
        "from dilocox_kernels.kernels import select\n"
        "try:\n    select('triton', 'cpu')\n"
        "except BackendError as error:\n    print(error)"
    )
    message = _python(tmp_path, "-c", code)
    assert "not on device cpu" in message
    assert "kernels=cpu" in message


def _accesses(cell: str) -> dict[int, int]:
    """Number by width, of "8 × 16, 2 × 8"."""
    pairs = [part.split(" × ") for part in cell.split(", ")]
    return {int(width): int(count) for count, width in pairs}


def _python(cache: Path, *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
