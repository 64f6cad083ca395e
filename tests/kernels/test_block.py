"""Block codecs: bit for bit against numpy, and what error feedback and convergence rest on."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels import reference
from dilocox_kernels.formats import BLOCK_SIZES, BlockFormat
from tests.kernels import oracle

FORMATS = st.builds(
    BlockFormat, st.sampled_from([4, 8]), st.sampled_from(BLOCK_SIZES), st.sampled_from(["fp16", "bf16", "fp32"])
)


def encode(fmt: BlockFormat, values: Tensor) -> tuple[Tensor, Tensor]:
    """(body, residual) of `values`."""
    body = torch.full((fmt.encoded_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    residual = torch.full_like(values, torch.nan)
    assert reference.encode(fmt, values, None, 1.0, body, residual).finite
    return body, residual


def decode(fmt: BlockFormat, body: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), torch.nan)
    reference.decode(fmt, body, out)
    return out


@given(FORMATS, oracle.ranges())
def test_bytes_and_values_equal_numpys(fmt: BlockFormat, values: oracle.Floats) -> None:
    expected = oracle.block(values, fmt.bits, fmt.block_size, fmt.scale_dtype_name)
    body, residual = encode(fmt, torch.from_numpy(values))
    assert body.numpy().tobytes() == expected.body
    assert np.array_equal(decode(fmt, body, len(values)).numpy(), expected.decoded)
    assert np.array_equal(residual.numpy().view(np.uint32), (values - expected.decoded).view(np.uint32))


@given(FORMATS, oracle.ranges())
def test_error_is_at_most_half_a_scale_and_is_kept_exactly(fmt: BlockFormat, values: oracle.Floats) -> None:
    assume(np.abs(values).max() / fmt.code_max <= fmt.max_scale)
    body, residual = encode(fmt, torch.from_numpy(values))
    decoded = decode(fmt, body, len(values)).double().numpy()
    _, scales = fmt.split(body, len(values))
    scale = scales.double().view(-1).repeat_interleave(fmt.block_size)[: len(values)].numpy()
    rounding_of_the_quotient = 1 + 2.0**-16
    below_fp32 = fmt.code_max * 2.0**-150  # a scale that is zero because max|v| / code_max is zero in fp32
    bound = np.where(scale > 0, scale / 2 * rounding_of_the_quotient, below_fp32)
    assert (np.abs(values - decoded) <= bound).all()
    assert np.array_equal(decoded + residual.double().numpy(), values.astype(np.float64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16", "fp32"])
def test_what_exceeds_the_largest_scale_saturates_and_stays_in_the_residual(bits: int, scale_dtype: str) -> None:
    fmt = BlockFormat(bits, 32, scale_dtype)
    values = torch.zeros(32)
    values[:3] = torch.tensor([oracle.FLOAT32_MAX, -oracle.FLOAT32_MAX, 1.0])
    body, residual = encode(fmt, values)
    decoded = decode(fmt, body, 32)
    largest = np.float32(fmt.code_max * fmt.max_scale)
    assert decoded[:3].tolist() == [largest, -largest, 0.0]
    assert decoded.isfinite().all()
    assert residual.isfinite().all()
    assert torch.equal(residual, values - decoded)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_below_the_smallest_fp16_scale_still_arrives_over_the_rounds(bits: int) -> None:
    fmt, delta, residual, sent = (
        BlockFormat(bits, 32, "fp16"),
        torch.full((32,), 1e-8),
        torch.zeros(32),
        torch.zeros(32),
    )
    for _ in range(100):
        body, kept = torch.empty(fmt.encoded_bytes(32), dtype=torch.uint8), torch.empty(32)
        reference.encode(fmt, delta, residual, 1.0, body, kept)
        sent, residual = sent + decode(fmt, body, 32), kept
    torch.testing.assert_close(sent, 100 * delta, rtol=0, atol=2.0**-25)


@pytest.mark.parametrize("fmt", [BlockFormat(4, 64, "fp16"), BlockFormat(8, 32, "bf16")])
def test_zeros_are_zero_bytes(fmt: BlockFormat) -> None:
    body, residual = encode(fmt, torch.tensor([0.0, -0.0] * 48))
    assert not body.any()
    assert not residual.any()


def test_an_int4_block_byte_by_byte() -> None:
    values = torch.zeros(33)
    values[:4] = torch.tensor([7.0, -7.0, 2.5, -1.0])
    values[32] = -3.5
    body, _ = encode(BlockFormat(4, 32, "fp16"), values)
    codes = bytes([0x97, 0xF2]) + bytes(14) + bytes([0x09]) + bytes(15)
    assert body.numpy().tobytes() == codes + bytes.fromhex("003c 0038")  # scales 1.0 and 0.5


@pytest.mark.parametrize(
    ("fmt", "name", "bits_per_parameter"),
    [
        (BlockFormat(4, 64, "fp16"), "int4/64/fp16", 4.25),
        (BlockFormat(4, 32, "fp32"), "int4/32/fp32", 5.0),
        (BlockFormat(8, 256, "bf16"), "int8/256/bf16", 8.0625),
    ],
)
def test_names_and_bits(fmt: BlockFormat, name: str, bits_per_parameter: float) -> None:
    assert fmt.name == name
    assert fmt.bits_per_parameter == bits_per_parameter
    assert fmt.encoded_bytes(0) == 0
    assert fmt.encoded_bytes(1) == fmt.encoded_bytes(fmt.block_size) == bits_per_parameter * fmt.block_size / 8


@pytest.mark.parametrize("wrong", [(3, 64, "fp16"), (4, 48, "fp16"), (4, 16, "fp16"), (8, 512, "fp32"), (4, 64, "fp8")])
def test_unknown_settings_are_refused(wrong: tuple[int, int, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        BlockFormat(*wrong)
