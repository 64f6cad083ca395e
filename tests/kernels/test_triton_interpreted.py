"""The Triton kernels in Triton's interpreter, bit for bit against the reference.

The interpreter has to be chosen before triton is imported for the first time, and stays for good: these tests run in a
process of their own, so that no other test meets it, in whatever order they run.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox_kernels.formats import CODES, BlockFormat, CastFormat, Format
from dilocox_kernels.rules import MAX_ISLANDS, Rule, Stochastic
from tests.kernels.triton_cases import Case, check_equal, check_not_finite

Run = Callable[..., object]
OPERATIONS = ("encode", "requantise", "decode", "outer_step")
SCALES = ("fp16", "bf16", "fp32", "e4m4")
BLOCK_FORMATS = [
    BlockFormat(code, (32, 64, 128, 256)[(i + j) % 4], scale)
    for i, code in enumerate(CODES)
    for j, scale in enumerate(SCALES)
]
FORMATS: list[Format] = [*BLOCK_FORMATS, CastFormat("fp32"), CastFormat("bf16")]
TWO_TILES_AND_MORE = ((0, 4608), (1, 65), (2, 3000))
"""Whole tiles of every size, a tile with gaps, and a tail."""
KEY = Stochastic(0xFEDC_BA98_7654_3210, 0xFFFF_FFFF)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function in the process of the interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_interpret) as pool:
        pool.submit(os.getpid).result()  # started here, so that no single test is taken to leave it behind
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _interpret() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_equals_the_reference(run: Run, fmt: Format) -> None:
    case = Case(fmt, TWO_TILES_AND_MORE)
    for operation in OPERATIONS:
        run(check_equal, case, operation)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS[::3], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_equals_the_reference(run: Run, fmt: Format) -> None:
    case = Case(fmt, TWO_TILES_AND_MORE, rounding=KEY, start=(1 << 34) - 4096, residual="fp32")
    run(check_equal, case, "encode")
    run(check_equal, case, "requantise")


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
def test_every_outer_step_equals_the_reference(run: Run, rule: Rule, values: str) -> None:
    case = Case(BlockFormat("int4", 64, "fp16"), TWO_TILES_AND_MORE, values, rule=rule, start=(1 << 31) - 2048)
    run(check_equal, case, "outer_step")
    run(check_equal, replace(case, local_weight=0.3), "outer_step")


def test_as_many_islands_as_may_be(run: Run) -> None:
    case = Case(BlockFormat("e2m1", 32, "e4m4"), ((0, 2100),), islands=MAX_ISLANDS)
    for operation in ("decode", "outer_step"):
        run(check_equal, case, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_and_bodies_need_no_alignment_beyond_their_elements_and_four_bytes(run: Run, operation: str) -> None:
    for fmt in (BlockFormat("int4", 64, "fp16"), BlockFormat("int8", 32, "fp32"), CastFormat("bf16")):
        run(check_equal, Case(fmt, ((0, 4200),), value_offset=1, body_offset=4), operation)


@pytest.mark.parametrize("exponent", [-140, -120, 100, 118])
def test_numbers_at_the_ends_of_fp32(run: Run, exponent: int) -> None:
    for fmt in BLOCK_FORMATS[::2]:
        run(check_equal, Case(fmt, ((0, 4096),), "fp32", "fp32", exponent=exponent), "encode")


@pytest.mark.parametrize("peak", [3.4e38, -3.4e38])
def test_what_exceeds_bf16_becomes_its_largest_finite_value(run: Run, peak: float) -> None:
    for fmt in (CastFormat("bf16"), BlockFormat("int4", 64, "fp16")):  # in the body; in the residual
        run(check_equal, Case(fmt, ((0, 4600),), "fp32", "bf16", anchored=False, peak=peak), "encode")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(run: Run, bad: float) -> None:
    for fmt in (BlockFormat("int4", 64, "fp16"), BlockFormat("bins2", 32, "e4m4"), CastFormat("bf16")):
        for position in (0, 2047, 4607):
            run(check_not_finite, Case(fmt, TWO_TILES_AND_MORE), position, bad)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fmt = draw(st.sampled_from(FORMATS))
    pieces = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2500)), min_size=1, max_size=6))
    return Case(
        fmt,
        tuple(pieces),
        draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        draw(st.sampled_from(["fp32", "bf16", None])),
        draw(st.booleans()),
        draw(st.sampled_from([None, KEY])) if isinstance(fmt, BlockFormat) else None,
        draw(st.sampled_from(list(Rule))),
        draw(st.sampled_from([0.0, 0.25])),
        draw(st.integers(1, 4)),
        draw(st.integers(-20, 8)),
        draw(st.sampled_from([0, 8])),
        draw(st.sampled_from([4, 128])),
        draw(st.integers(0, 1 << 40)) * 4,
        draw(st.integers(0, 1 << 20)),
    )


@given(cases(), st.sampled_from(OPERATIONS))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_equals_the_reference(run: Run, case: Case, operation: str) -> None:
    run(check_equal, case, operation)


def test_every_tile_has_one_program(run: Run) -> None:
    run(_check_plan)


def _check_plan() -> None:
    from dilocox_kernels.gpu.plan import plan_tiles

    bounds = ((0, 3000), (3000, 3100), (4096, 12288))
    values = [torch.zeros(stop - start) for start, stop in bounds]
    plan = plan_tiles(13000, bounds, values, 1024, 16, torch.device("cpu"))
    assert plan.whole[:, 0].tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert plan.whole[:, 1].tolist()[1:3] == [values[0].data_ptr() + 4096, values[2].data_ptr()]
    assert plan.partial.tolist() == [[2, 0, 2], [3, 1, 2], [12, 3, 3]]
    unaligned = [value[1:] for value in map(torch.zeros, (3001, 101, 8193))]
    assert len(plan_tiles(13000, bounds, unaligned, 1024, 16, torch.device("cpu")).whole) == 0


def test_a_tiling_is_tried_once_and_kept_on_disk(run: Run, tmp_path: Path) -> None:
    assert run(_tune, str(tmp_path)) == (2048, 8, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["tilings.json"]
    assert run(_tune, str(tmp_path)) == (2048, 8, 0)


def _tune(folder: str) -> tuple[int, int, int]:
    """The tiling that a made-up clock prefers, and how many were tried."""
    from dilocox_kernels.gpu import tuning
    from dilocox_kernels.gpu.launches import Launch, Tiling

    tried: list[Tiling] = []

    def seconds(launches: Callable[[Tiling], list[Launch]], tiling: Tiling, device: torch.device) -> float:
        tried.append(tiling)
        return 1.0 if tiling == Tiling(2048, 8) else 2.0

    tuning.tuned_tiling.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILOCOX_CACHE", folder)
        patch.setattr(tuning, "_seconds", seconds)
        patch.setattr(tuning, "TRIAL_ELEMENTS", 8192)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        tiling = tuning.tuned_tiling("encode", BlockFormat("int4", 64, "fp16"), torch.device("cpu"))
    return tiling.tile, tiling.num_warps, len(tried)
