"""Scales on the device: what a block wants, what is stored, what a receiver reads."""

import triton
import triton.language as tl

from dilocox_kernels.gpu.codes import bits_of, float_from, round_to_integer


@triton.jit
def wanted_scale(v: tl.tensor, real: tl.tensor, F: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """fp32 [blocks, 1] of fp32 v [blocks, block]; bins2 takes the mean over what is `real`."""
    magnitude = tl.abs(v)
    largest = float_from(tl.max(bits_of(magnitude), axis=1, keep_dims=True))
    if F.family == "bins":
        divisor = tl.where(largest == 0.0, 1.0, largest)
        steps = round_to_integer(tl.div_rn(magnitude, tl.broadcast_to(divisor, v.shape)) * 2047.0)
        squares = tl.sum(steps * steps, axis=1, keep_dims=True).to(tl.float32)
        if WHOLE:
            count = tl.full(squares.shape, F.block, tl.float32)
        else:
            count = tl.maximum(tl.sum(real.to(tl.int32), axis=1, keep_dims=True), 1).to(tl.float32)
        wanted = tl.sqrt_rn(tl.div_rn(squares, count)) * F.bins_factor * largest
    else:
        wanted = tl.div_rn(largest, tl.full(largest.shape, F.top, tl.float32))
    return tl.minimum(wanted, F.max_scale)


@triton.jit
def stored_scale(wanted: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Bits (int32) and fp32 value of the scale that is stored for `wanted` ≥ 0, in fp16, bf16 or fp32.

    The smallest that is not below; for bins2 the nearest, ties to even.
    """
    bits = bits_of(wanted)
    if F.scale == "bf16":
        if F.round_up:
            bits = (bits + 0xFFFF) >> 16
        else:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits, float_from(bits << 16)
    elif F.scale == "fp16":
        half = wanted.to(tl.float16)
        bits = half.to(tl.int16, bitcast=True)
        if F.round_up:
            bits += (half.to(tl.float32) < wanted).to(tl.int16)
        return bits.to(tl.int32), bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits, wanted


@triton.jit
def shared_base_scale(wanted: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Codes (int32 [blocks, 1]), fp32 values and the base (int32) of e4m4 scales; the tile is one group."""
    if F.round_up:
        exponent = (bits_of(wanted) + 0x7FFFF) >> 19
    else:
        exponent = (bits_of(wanted) + 0x40000) >> 19
    base = tl.max(exponent) - 255
    code = exponent - base
    if F.round_up:
        code = tl.where(wanted == 0.0, 0, tl.maximum(code, 1))
    else:
        code = tl.where(wanted == 0.0, 0, tl.maximum(code, 0))
    return code, shared_base_value(code, base), base


@triton.jit
def shared_base_value(code: tl.tensor, base: tl.tensor) -> tl.tensor:
    """fp32 value of e4m4 codes (int32) over a base (int32)."""
    return tl.where(code == 0, 0.0, float_from((base + code) << 19))
