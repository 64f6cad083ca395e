"""The CPU back end, bit for bit against the reference, on every level of instructions that this processor has."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given

from dilocox_kernels.cpu import CpuBackend
from dilocox_kernels.formats import BLOCK_SIZES, GROUP_ELEMENTS, BlockFormat, CastFormat, Format
from dilocox_kernels.rules import MAX_ISLANDS, Rule, Stochastic
from dilocox_kernels.spans import Spans
from tests.kernels.cases import SOME_FORMATS, threads
from tests.kernels.cpu_cases import ALL_CODES, ALL_SCALES, OPERATIONS, Buffers, Case, cases, check_equal, on_level, run

each_level = pytest.mark.parametrize("level", CpuBackend.levels())
each_format = pytest.mark.parametrize("fmt", SOME_FORMATS, ids=lambda fmt: fmt.name)
RANDOM = Stochastic(0xFEDC_BA98_7654_3210, 0xFFFF_FFFF)
SEVERAL_TILES = Spans(9001, ((0, 4500), (4608, 4611), (4864, 8998)))
"""A whole tile, one with gaps, and a tail that fills no block."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@each_level
@pytest.mark.parametrize("code", ALL_CODES)
@pytest.mark.parametrize("scale", ALL_SCALES)
def test_every_block_format(level: str, code: str, scale: str) -> None:
    kernels = on_level(level)
    for block_size in BLOCK_SIZES:
        case = Case(BlockFormat(code, block_size, scale), SEVERAL_TILES, start=GROUP_ELEMENTS)
        check_equal(case, kernels)
        check_equal(replace(case, rounding=RANDOM, seed=1), kernels, ("encode", "requantise"))


@each_level
@each_format
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
def test_every_dtype_rule_and_mix(level: str, fmt: Format, residual: torch.dtype | None) -> None:
    kernels = on_level(level)
    for values in (torch.float32, torch.bfloat16, torch.float16):
        for anchored in (False, True):
            check_equal(Case(fmt, SEVERAL_TILES, values, residual, anchored), kernels, ("encode", "requantise"))
    if residual is None:  # which an outer step does not know
        for values, rule, local in product((torch.float32, torch.bfloat16, torch.float16), Rule, (0.0, 0.3)):
            case = Case(fmt, SEVERAL_TILES, values, rule=rule, local_weight=local, start=(1 << 31) - 2000)
            check_equal(case, kernels, ("outer_step",))


@each_level
@given(case=cases())
def test_ranges_of_all_kinds(level: str, case: Case) -> None:
    check_equal(case, on_level(level))


@each_level
@pytest.mark.parametrize("fmt", [BlockFormat("e2m1", 32, "e4m4"), CastFormat("bf16")], ids=lambda fmt: fmt.name)
def test_as_many_islands_as_may_be(level: str, fmt: Format) -> None:
    case = Case(fmt, Spans(4300, ((0, 100), (128, 4299))), islands=MAX_ISLANDS)
    check_equal(case, on_level(level), ("requantise", "decode", "outer_step"))


@each_format
def test_hundreds_of_tiny_spans(fmt: Format) -> None:
    bounds = tuple((start, start + 1 + start // 256 % 200) for start in range(0, 120_000, 256))
    check_equal(Case(fmt, Spans(120_000, bounds)), on_level(CpuBackend.levels()[0]))


@each_level
@each_format
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_thread_equals_two(level: str, fmt: Format, operation: str) -> None:
    kernels = on_level(level)
    numel = 70 * GROUP_ELEMENTS + 33
    rounding = RANDOM if isinstance(fmt, BlockFormat) else None
    case = Case(fmt, Spans(numel, ((0, 100_000), (100_096, 100_100), (102_400, numel))), rounding=rounding)
    two = run(kernels, case, operation)
    with threads(1):
        assert run(kernels, case, operation) == two


@each_level
@pytest.mark.parametrize("rounding", [None, RANDOM])
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ALL_CODES)
def test_large_aligned_ranges_whose_residuals_go_past_the_caches(
    level: str, code: str, residual: torch.dtype, rounding: Stochastic | None
) -> None:
    numel = (1 << 20) + GROUP_ELEMENTS + 33
    spans = Spans(numel, ((0, 500_000), (500_032, 500_100), (512_000, numel)))
    case = Case(BlockFormat(code, 32, "fp16"), spans, torch.bfloat16, residual, rounding=rounding, guard=64)
    kept = Buffers(case).kept
    assert kept is not None
    assert kept.data_ptr() % 64 == 0
    check_equal(case, on_level(level), ("encode",))


def test_levels_agree_in_the_sum_of_squares_too() -> None:
    case = Case(BlockFormat("int4", 64, "fp16"), Spans.whole(50_001), torch.float32)
    assert len({run(on_level(level), case, "encode").norms for level in CpuBackend.levels()}) == 1


@each_level
@each_format
def test_more_than_bf16_holds_saturates_in_residuals(level: str, fmt: Format) -> None:
    check_equal(Case(fmt, SEVERAL_TILES, torch.float32, torch.bfloat16, magnitude=3e37), on_level(level))


@each_level
@each_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_found_wherever_they_are(level: str, fmt: Format, bad: float) -> None:
    kernels = on_level(level)
    case = Case(fmt, SEVERAL_TILES, torch.float32, torch.float32)
    for span, index in ((0, 0), (0, 4095), (0, 4096), (0, 4499), (1, 2), (2, 17), (2, 4133)):
        for operand in ("anchor", "values", "residual"):
            use = Buffers(case)
            place = SEVERAL_TILES.bounds[span][0] + index
            targets = {"anchor": use.anchor[place:], "values": use.values[span][index:]}
            assert use.residual is not None
            target = targets[operand] if operand in targets else use.residual[place:]
            target[0] = bad
            norms = kernels.encode(
                fmt,
                use.values,
                case.spans,
                anchor=use.anchor,
                residual=use.residual,
                decay=0.9,
                rounding=None,
                start=0,
                out=use.out,
                residual_out=use.kept,
            )
            assert not norms.finite, f"{operand} at {place}"


@each_level
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_a_body_is_found_by_requantise(level: str, bad: float) -> None:
    case = Case(CastFormat("fp32"), SEVERAL_TILES)
    for place in (0, 4499, 4610, 8997):
        use = Buffers(case)
        bodies = use.bodies()
        bodies[1].view(torch.float32)[place] = bad
        norms = on_level(level).requantise(
            case.fmt,
            bodies,
            use.weights,
            case.spans,
            residual=None,
            decay=1.0,
            rounding=None,
            start=0,
            out=use.out,
            residual_out=None,
        )
        assert not norms.finite


@each_level
@each_format
def test_gaps_of_bodies_do_not_matter(level: str, fmt: Format) -> None:
    kernels, case = on_level(level), Case(fmt, Spans(1280, ((256, 500), (512, 515))))
    outs = []
    for noise in (0, 0x55):
        use = Buffers(case)
        bodies = use.bodies()
        element = fmt.encoded_bytes(1280) // 1280
        if isinstance(fmt, BlockFormat):
            fmt.split(bodies[0], 1280).codes[768 // fmt.block_size :] = noise
        else:
            bodies[0][768 * element :] = noise
        kernels.decode_accumulate(fmt, bodies, use.weights, case.spans, use.merged)
        outs.append(use.merged.clone())
    assert torch.equal(outs[0], outs[1])


@each_level
def test_denormals_are_kept_whatever_the_calling_thread_does(level: str) -> None:
    kernels, fmt = on_level(level), BlockFormat("int8", 32, "fp32")
    case = Case(fmt, Spans.whole(3 * GROUP_ELEMENTS), torch.float32, torch.float32, magnitude=1e-39)
    outcomes = []
    for flush in (False, True):
        use = Buffers(case)
        assert torch.set_flush_denormal(flush)
        try:
            kernels.encode(
                fmt,
                use.values,
                case.spans,
                anchor=use.anchor,
                residual=use.residual,
                decay=0.9,
                rounding=None,
                start=0,
                out=use.out,
                residual_out=use.kept,
            )
            kernels.decode(fmt, use.out, case.spans, use.merged)
            assert (torch.tensor([1e-39]) * 1.0).item() == (0.0 if flush else pytest.approx(1e-39))  # left as it was
        finally:
            torch.set_flush_denormal(False)
        outcomes.append(use.outcome())
    assert outcomes[0] == outcomes[1]
    assert use.merged.abs().max() > 0
