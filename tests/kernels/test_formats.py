"""Block formats and casts: bit for bit against numpy, and the bounds that error feedback rests on."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from dilocox_kernels.formats import CODES, BlockFormat, CastFormat
from dilocox_kernels.kernels import select
from dilocox_kernels.philox import philox, uniform
from dilocox_kernels.spans import Spans
from tests.kernels import oracle
from tests.kernels.cases import BACKENDS, BLOCK_FORMATS, decode, encode

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_backend
@given(fmt=BLOCK_FORMATS, values=oracle.ranges())
def test_bytes_and_values_equal_numpys(backend: str, fmt: BlockFormat, values: oracle.Floats) -> None:
    kernels = select(backend, "cpu")
    expected = oracle.block(values, fmt.code, fmt.block_size, fmt.scale)
    body, residual, _ = encode(kernels, fmt, [torch.from_numpy(values)])
    assert body.numpy().tobytes() == expected.body
    decoded = decode(kernels, fmt, body, Spans.whole(len(values))).numpy()
    assert np.array_equal(decoded, expected.decoded)
    assert np.array_equal(residual.numpy(), values - expected.decoded)


@each_backend
@pytest.mark.parametrize("code", CODES)
def test_many_groups_equal_numpys(backend: str, code: str) -> None:
    fmt = BlockFormat(code, 32, "e4m4")
    generator = np.random.default_rng(1)
    magnitudes = np.exp(generator.uniform(-30, 0, 20_000 // 32 + 1)).repeat(32)[:20_000]
    values = (generator.standard_normal(20_000) * magnitudes).astype(np.float32)
    body, _, _ = encode(select(backend, "cpu"), fmt, [torch.from_numpy(values)])
    assert body.numpy().tobytes() == oracle.block(values, code, 32, "e4m4").body


@given(fmt=BLOCK_FORMATS, values=oracle.ranges())
def test_error_is_at_most_half_a_step_and_is_kept(fmt: BlockFormat, values: oracle.Floats) -> None:
    code = CODES[fmt.code]
    assume(code.absmax and np.abs(values).max() / code.top <= fmt.max_scale)
    kernels, spans = select("cpu", "cpu"), Spans.whole(len(values))
    body, residual, _ = encode(kernels, fmt, [torch.from_numpy(values)])
    decoded = decode(kernels, fmt, body, spans).double().numpy()
    scale = oracle.block(values, fmt.code, fmt.block_size, fmt.scale).scales.astype(np.float64)
    scale = scale.repeat(fmt.block_size)[: len(values)]
    widest = max(high - low for low, high in zip(code.magnitudes, code.magnitudes[1:], strict=False))
    rounding_of_the_quotient = 1 + 2.0**-16
    below_fp32 = code.top * 2.0**-149  # a scale that is zero because max|v| / top is zero in fp32
    bound = np.where(scale > 0, widest * scale / 2 * rounding_of_the_quotient, below_fp32)
    assert (np.abs(values - decoded) <= bound).all()
    assert np.array_equal(decoded + residual.double().numpy(), values.astype(np.float64))


@pytest.mark.parametrize("code", ["int8", "int4", "e2m1", "e3m0"])
@pytest.mark.parametrize("scale", ["fp16", "bf16", "fp32", "e4m4"])
def test_what_exceeds_the_largest_scale_saturates_and_stays_in_the_residual(code: str, scale: str) -> None:
    fmt, kernels = BlockFormat(code, 32, scale), select("cpu", "cpu")
    values = torch.zeros(32)
    values[:3] = torch.tensor([oracle.FLOAT32_MAX, -oracle.FLOAT32_MAX, 1.0])
    body, residual, _ = encode(kernels, fmt, [values])
    decoded = decode(kernels, fmt, body, Spans.whole(32))
    largest = np.float32(CODES[code].top * fmt.max_scale)
    assert decoded[:3].tolist() == [largest, -largest, 0.0]
    assert decoded.isfinite().all()
    assert torch.equal(residual, values - decoded)


@pytest.mark.parametrize("code", ["int8", "int4", "e2m1", "e3m0"])
def test_what_is_below_the_smallest_fp16_scale_still_arrives_over_the_rounds(code: str) -> None:
    fmt, kernels, spans = BlockFormat(code, 32, "fp16"), select("cpu", "cpu"), Spans.whole(32)
    delta, residual, sent = torch.full((32,), 1e-8), torch.zeros(32), torch.zeros(32)
    for _ in range(100):
        body, kept, _ = encode(kernels, fmt, [delta], residual=residual)
        sent, residual = sent + decode(kernels, fmt, body, spans), kept
    widest = CODES[code].magnitudes[-1] - CODES[code].magnitudes[-2]
    torch.testing.assert_close(sent, 100 * delta, rtol=0, atol=widest * 2.0**-25)


@pytest.mark.parametrize("scale", ["fp16", "e4m4"])
@pytest.mark.parametrize("code", ["int4", "int8"])
def test_zeros_are_zero_codes_and_scales(code: str, scale: str) -> None:
    fmt = BlockFormat(code, 64, scale)
    body, residual, _ = encode(select("cpu", "cpu"), fmt, [torch.tensor([0.0, -0.0] * 48)])
    parts = fmt.split(body, 96)
    assert not parts.codes.any()
    assert not parts.scales.any()
    assert not residual.any()


def test_an_int4_block_byte_by_byte() -> None:
    values = torch.zeros(33)
    values[:4] = torch.tensor([7.0, -7.0, 2.5, -1.0])
    values[32] = -3.5
    body, _, _ = encode(select("cpu", "cpu"), BlockFormat("int4", 32, "fp16"), [values])
    codes = bytes([0x97, 0xF2]) + bytes(14) + bytes([0x09]) + bytes(15)
    assert body.numpy().tobytes() == codes + bytes.fromhex("003c 0038")  # scales 1.0 and 0.5


def test_a_two_bit_block_byte_by_byte() -> None:
    values = torch.tensor([1.0, -1.0, 4.0, -4.0] * 8)
    body, _, _ = encode(select("cpu", "cpu"), BlockFormat("bins2", 32, "fp32"), [values])
    assert body[:8].numpy().tobytes() == bytes([0b11_01_10_00] * 8)
    scale = body[8:].view(torch.float32).item()
    assert scale == pytest.approx(0.4528 * 8.5**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("fmt", "name", "bits_per_parameter"),
    [
        (BlockFormat("int4", 64, "fp16"), "int4/64/fp16", 4.25),
        (BlockFormat("int4", 32, "fp32"), "int4/32/fp32", 5.0),
        (BlockFormat("int8", 256, "bf16"), "int8/256/bf16", 8.0625),
        (BlockFormat("bins2", 128, "fp16"), "bins2/128/fp16", 2.125),
    ],
)
def test_names_and_bits(fmt: BlockFormat, name: str, bits_per_parameter: float) -> None:
    assert fmt.name == name
    assert fmt.bits_per_parameter == bits_per_parameter
    assert fmt.encoded_bytes(0) == 0
    assert fmt.encoded_bytes(1) == fmt.encoded_bytes(fmt.block_size) == bits_per_parameter * fmt.block_size / 8


def test_quantised_scales_bring_int4_to_four_bits_and_an_eighth() -> None:
    assert BlockFormat("int4", 64, "e4m4").bits_per_parameter <= 4.13


@pytest.mark.parametrize(
    "wrong",
    [("int3", 64, "fp16"), ("int4", 48, "fp16"), ("int4", 16, "fp16"), ("e2m1", 512, "fp32"), ("int4", 64, "fp8")],
)
def test_unknown_settings_are_refused(wrong: tuple[str, int, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        BlockFormat(*wrong)


def test_an_unknown_cast_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='fp16'"):
        CastFormat("fp16")


@each_backend
@given(values=oracle.ranges())
def test_casts(backend: str, values: oracle.Floats) -> None:
    kernels, spans = select(backend, "cpu"), Spans.whole(len(values))
    exact, kept, _ = encode(kernels, CastFormat("fp32"), [torch.from_numpy(values)])
    assert exact.numpy().tobytes() == values.astype("<f4").tobytes()
    assert not kept.any()
    halved, kept, _ = encode(kernels, CastFormat("bf16"), [torch.from_numpy(values)])
    bits = values.view(np.uint32).astype(np.uint64)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    saturated = np.where(nearest_even & 0x7FFF == 0x7F80, nearest_even - 1, nearest_even).astype("<u2")
    assert halved.numpy().tobytes() == saturated.tobytes()
    decoded = decode(kernels, CastFormat("bf16"), halved, spans).double().numpy()
    assert np.array_equal(kept.double().numpy() + decoded, values)


def test_random_numbers_are_philox() -> None:
    # The known answers of the authors' test vectors: counter and key of zeros, and of ones.
    zeros = philox(0, 0, torch.arange(4)).tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    positions: Tensor = torch.tensor([0, 1, 5, 1023, 4 * 2**32 + 7, 2**40])
    key, round_number = 0x0123456789ABCDEF, 77
    expected = [oracle.philox(key, round_number, position) for position in positions.tolist()]
    assert philox(key, round_number, positions).tolist() == expected
    drawn = uniform(key, round_number, torch.arange(100_000))
    assert 0 <= drawn.min() < 1e-3
    assert 1 - 1e-3 < drawn.max() < 1
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.005)
