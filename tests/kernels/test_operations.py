"""What holds for every format and back end: error feedback, norms, gaps, cuts, threads, rounding at random, NaN."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels.checksum import checksum64
from dilocox_kernels.formats import CODES, GROUP_ELEMENTS, BlockFormat, CastFormat, Format
from dilocox_kernels.kernels import select
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans
from tests.kernels import oracle
from tests.kernels.cases import BACKENDS, BLOCK_FORMATS, SOME_FORMATS, decode, encode, noise, threads

LONG = 50 * GROUP_ELEMENTS + 4321
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_format = pytest.mark.parametrize("fmt", SOME_FORMATS, ids=lambda fmt: fmt.name)
GAPPED = Spans(1280, ((0, 500), (512, 515), (768, 1249)))


@each_backend
@each_format
@given(delta=oracle.ranges(), owed=oracle.ranges(), decay=st.sampled_from([0.0, 0.9, 1.0]))
def test_residual_is_what_was_to_be_sent_minus_what_was(
    backend: str, fmt: Format, delta: oracle.Floats, owed: oracle.Floats, decay: float
) -> None:
    kernels = select(backend, "cpu")
    quarter = np.float32(0.25)  # so that the sum stays finite
    delta, owed = delta[: len(owed)] * quarter, owed[: len(delta)] * quarter
    before = delta.copy(), owed.copy()
    body, kept, _ = encode(kernels, fmt, [torch.from_numpy(delta)], residual=torch.from_numpy(owed), decay=decay)
    to_send = delta + np.float32(decay) * owed
    assert np.array_equal(kept.numpy(), to_send - decode(kernels, fmt, body, Spans.whole(len(delta))).numpy())
    assert np.array_equal(delta, before[0])
    assert np.array_equal(owed, before[1])
    assert torch.equal(encode(kernels, fmt, [torch.from_numpy(to_send)])[0], body)


@each_backend
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delta_is_the_anchor_less_the_local_weights_and_gaps_are_left_alone(
    backend: str, fmt: Format, dtype: torch.dtype
) -> None:
    kernels, anchor = select(backend, "cpu"), noise(GAPPED.numel, 1)
    local = [part.to(dtype) for part in GAPPED.cut(noise(GAPPED.numel, 2))]
    anchor[500:512] = torch.nan  # a gap
    body, kept, norms = encode(kernels, fmt, local, GAPPED, anchor=anchor)
    delta = torch.zeros(GAPPED.numel)
    for place, part, mine in zip(GAPPED.cut(delta), GAPPED.cut(anchor), local, strict=True):
        place.copy_(part - mine.float())
    same, _, _ = encode(kernels, fmt, GAPPED.cut(delta), GAPPED)
    assert torch.equal(body, same)
    assert norms.finite
    assert norms.max_abs == delta.abs().max().item()
    gaps = torch.ones(GAPPED.numel, dtype=torch.bool)
    for place in GAPPED.cut(gaps):
        place.fill_(False)
    assert (kept[gaps] == 7).all()
    assert not decode(kernels, fmt, body, GAPPED)[gaps].any()


@each_backend
@given(fmt=BLOCK_FORMATS, random=st.booleans(), data=st.data())
def test_cuts_at_whole_groups_change_no_bit(backend: str, fmt: BlockFormat, random: bool, data: st.DataObject) -> None:
    kernels, numel = select(backend, "cpu"), 4 * GROUP_ELEMENTS + 100
    rounding = Stochastic(key=3, round=9) if random else None
    delta, owed = noise(numel, 1), noise(numel, 2)
    body, kept, _ = encode(kernels, fmt, [delta], residual=owed, decay=0.9, rounding=rounding)
    inner = data.draw(st.lists(st.integers(0, 4), max_size=3))
    for start, stop in pairwise(sorted({0, numel, *(cut * GROUP_ELEMENTS for cut in inner)})):
        here = slice(start, stop)
        part, part_kept, _ = encode(
            kernels, fmt, [delta[here]], residual=owed[here], decay=0.9, rounding=rounding, start=start
        )
        assert torch.equal(part_kept, kept[here])
        blocks = slice(start // fmt.block_size, fmt.blocks(stop))
        mine, whole = fmt.split(part, stop - start), fmt.split(body, numel)
        assert torch.equal(mine.codes, whole.codes[blocks])
        assert torch.equal(mine.scales.view(torch.uint8), whole.scales[blocks].view(torch.uint8))


@each_backend
@each_format
def test_one_thread_equals_two(backend: str, fmt: Format) -> None:
    kernels, spans = select(backend, "cpu"), Spans.whole(LONG)
    results = []
    for count in (1, 2):
        with threads(count):
            body, kept, norms = encode(kernels, fmt, [noise(LONG, 1)], residual=noise(LONG, 2), decay=0.9)
            anchor, momentum, local = noise(LONG, 3), noise(LONG, 4), noise(LONG, 5)
            rule = OuterRule(Rule.NESTEROV, 0.7, 0.9)
            checksum = kernels.outer_step(
                fmt,
                [body, body],
                [0.25, 0.75],
                spans,
                anchor=anchor,
                momentum=momentum,
                values=[local],
                rule=rule,
                local_weight=0.5,
                start=0,
            )
            results.append((body, kept, anchor, momentum, local, norms, checksum))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:5], results[1][:5], strict=True))
    assert results[0][5:] == results[1][5:]


@each_backend
@each_format
def test_a_merge_is_the_weighted_sum_in_the_order_of_the_bodies(backend: str, fmt: Format) -> None:
    kernels, weights = select(backend, "cpu"), [0.5, 0.3, 0.2]
    bodies = [encode(kernels, fmt, GAPPED.cut(noise(GAPPED.numel, seed)), GAPPED)[0] for seed in range(3)]
    merged = torch.full((GAPPED.numel,), torch.nan)
    kernels.decode_accumulate(fmt, bodies, weights, GAPPED, merged)
    expected = sum(w * decode(kernels, fmt, b, GAPPED).double() for w, b in zip(weights, bodies, strict=True))
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-9)
    again = [encode(kernels, fmt, GAPPED.cut(merged), GAPPED, residual=noise(GAPPED.numel, 9), decay=0.5)]
    out, kept = torch.empty_like(bodies[0]), torch.full((GAPPED.numel,), 7.0)
    norms = kernels.requantise(
        fmt,
        bodies,
        weights,
        GAPPED,
        residual=noise(GAPPED.numel, 9),
        decay=0.5,
        rounding=None,
        start=0,
        out=out,
        residual_out=kept,
    )
    assert torch.equal(out, again[0][0])
    assert torch.equal(kept, again[0][1])
    assert norms == again[0][2]


@each_backend
@each_format
@pytest.mark.parametrize("kind", Rule)
@pytest.mark.parametrize("local_weight", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_outer_step_is_merge_rule_and_mix(
    backend: str, fmt: Format, kind: Rule, local_weight: float, dtype: torch.dtype
) -> None:
    kernels, lr, mu = select(backend, "cpu"), 0.7, 0.9
    bodies = [encode(kernels, fmt, GAPPED.cut(noise(GAPPED.numel, seed)), GAPPED)[0] for seed in range(2)]
    merged = torch.empty(GAPPED.numel)
    kernels.decode_accumulate(fmt, bodies, [0.25, 0.75], GAPPED, merged)
    anchor, momentum = noise(GAPPED.numel, 5), noise(GAPPED.numel, 6)
    for place in (slice(500, 512), slice(515, 768), slice(1249, 1280)):
        anchor[place] = momentum[place] = 0
    local = [part.to(dtype) for part in GAPPED.cut(noise(GAPPED.numel, 7))]

    buffer = momentum * mu + merged
    moved = {Rule.SGD: merged, Rule.MOMENTUM: buffer, Rule.NESTEROV: merged + buffer * mu}[kind]
    expected = anchor - moved * lr
    mixed = [
        (mine.float() * local_weight + part * (1 - local_weight)).to(dtype)
        for mine, part in zip(local, GAPPED.cut(expected), strict=True)
    ]
    with_momentum = None if kind is Rule.SGD else momentum
    checksum = kernels.outer_step(
        fmt,
        bodies,
        [0.25, 0.75],
        GAPPED,
        anchor=anchor,
        momentum=with_momentum,
        values=local,
        rule=OuterRule(kind, lr, 0.0 if kind is Rule.SGD else mu),
        local_weight=local_weight,
        start=4096,
    )
    assert torch.equal(anchor, expected)
    assert with_momentum is None or torch.equal(momentum, buffer)
    assert all(torch.equal(mine, right) for mine, right in zip(local, mixed, strict=True))
    assert checksum == checksum64(anchor, 4096)


@each_backend
@pytest.mark.parametrize("code", CODES)
def test_the_mean_of_random_roundings_is_what_was_to_be_sent(backend: str, code: str) -> None:
    fmt, kernels, seeds = BlockFormat(code, 64, "fp16"), select(backend, "cpu"), 400
    delta = noise(256, 1)
    if code == "bins2":  # what lies beyond its outer values is cut off, so nothing may
        delta = delta.clamp(-1e-3, 1e-3)
    decoded = [
        decode(kernels, fmt, encode(kernels, fmt, [delta], rounding=Stochastic(seed, 1))[0], Spans.whole(256))
        for seed in range(seeds)
    ]
    samples = torch.stack(decoded).double()
    widest = max(high - low for low, high in pairwise((-CODES[code].magnitudes[0], *CODES[code].magnitudes)))
    step = widest * float(fmt.split(encode(kernels, fmt, [delta])[0], 256).scales.max())
    tolerance = 5 * (step / 2) / seeds**0.5  # five standard deviations at most
    assert (samples.mean(dim=0) - delta).abs().max() < tolerance
    assert samples.std(dim=0).max() > 0


@each_backend
@each_format
def test_a_bf16_residual_is_the_fp32_one_rounded(backend: str, fmt: Format) -> None:
    kernels, delta = select(backend, "cpu"), noise(1000, 1)
    owed = noise(1000, 2).to(torch.bfloat16)
    body, exact, _ = encode(kernels, fmt, [delta], residual=owed.float(), decay=0.9)
    same, rounded, _ = encode(kernels, fmt, [delta], residual=owed, decay=0.9)
    assert torch.equal(body, same)
    assert torch.equal(rounded, exact.to(torch.bfloat16))


@each_backend
@each_format
def test_norms_are_of_delta_alone(backend: str, fmt: Format) -> None:
    kernels, delta, owed = select(backend, "cpu"), noise(LONG, 3), noise(LONG, 4)
    norms = encode(kernels, fmt, [delta], residual=owed, decay=0.5)[2]
    assert norms.sum_of_squares == pytest.approx(delta.double().square().sum().item(), rel=1e-12)
    assert norms.max_abs == delta.abs().max().item()
    assert norms.l2 == norms.sum_of_squares**0.5
    assert norms.finite
    huge = encode(kernels, fmt, [torch.full((70,), 1e38)])[2]
    assert huge.sum_of_squares == pytest.approx(70e76, rel=1e-6)  # beyond fp32


@each_backend
@each_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, LONG - 1])
def test_nan_and_infinity_are_reported_and_never_encoded(backend: str, fmt: Format, bad: float, position: int) -> None:
    for where in (0, 1, 2):
        buffers: list[Tensor] = [noise(LONG, seed) for seed in range(3)]
        buffers[where][position] = bad
        body, kept, norms = encode(
            select(backend, "cpu"), fmt, [buffers[0]], anchor=buffers[1], residual=buffers[2], decay=0.5
        )
        assert not norms.finite
        assert not body.any()
        assert not kept.any()


@each_backend
@each_format
def test_a_sum_beyond_fp32_is_not_finite(backend: str, fmt: Format) -> None:
    huge = torch.full((3,), 3e38)
    assert not encode(select(backend, "cpu"), fmt, [huge], residual=huge.clone())[2].finite


@each_backend
@each_format
def test_an_empty_range_is_an_empty_body(backend: str, fmt: Format) -> None:
    kernels, empty = select(backend, "cpu"), Spans(0, ())
    body, _, norms = encode(kernels, fmt, [], empty)
    assert body.numel() == 0
    assert norms == Norms(0.0, 0.0, True)
    assert decode(kernels, fmt, body, empty).numel() == 0


def test_fifty_rounds_of_error_feedback_lose_nothing() -> None:
    kernels, spans = select("cpu", "cpu"), Spans.whole(1000)
    for fmt in SOME_FORMATS:
        residual, sent, owed = torch.zeros(1000), torch.zeros(1000).double(), torch.zeros(1000).double()
        for number in range(50):
            delta = noise(1000, number)
            body, residual, _ = encode(kernels, fmt, [delta], residual=residual)
            sent += decode(kernels, fmt, body, spans).double()
            owed += delta.double()
        torch.testing.assert_close(sent + residual.double(), owed, rtol=0, atol=1e-7)


def test_the_example_of_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    assert "assert norms.finite" in example
    exec(example, {})


def test_casts_have_no_random_rounding() -> None:
    with pytest.raises(ValueError, match="rounding: fp32"):
        encode(select("reference", "cpu"), CastFormat("fp32"), [noise(8, 1)], rounding=Stochastic(1, 1))
