"""How a tile meets a body: codes, scales and bases, written and read."""

import triton
import triton.language as tl

from dilocox_kernels.gpu.codes import float_from, pack, quantise, signed_magnitude, unpack
from dilocox_kernels.gpu.scales import shared_base_scale, shared_base_value, stored_scale, wanted_scale
from dilocox_kernels.gpu.streams import load_tile, rounded_bf16, store_tile, widened


@triton.jit
def write_blocks(
    v: tl.tensor,
    real: tl.tensor,
    u: tl.tensor,
    codes: tl.tensor,
    bases: tl.tensor,
    scales: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    F: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Encode tile number `tile`, fp32 v [blocks, block], into its place of a body; returns what a receiver decodes."""
    BLOCKS: tl.constexpr = v.shape[0]
    wanted = wanted_scale(v, real, F, WHOLE)
    if F.scale == "e4m4":
        scale_bits, scale, base = shared_base_scale(wanted, F)
        tl.store(bases + tile, base.to(tl.int16))
    else:
        scale_bits, scale = stored_scale(wanted, F)
    code = quantise(v, scale, u, F, STOCHASTIC)
    units = pack(code, F)

    block = tl.arange(0, BLOCKS)[:, None]
    unit = block * (F.block // 4) + tl.arange(0, F.block // 4)[None, :]
    codes += tile * (BLOCKS * F.block // 4)
    scales += tile * BLOCKS
    scale_bits = scale_bits.to(scales.dtype.element_ty)
    if WHOLE:
        tl.store(codes + unit, units)
        tl.store(scales + block, scale_bits)
    else:
        there = block < (numel + F.block - 1) // F.block - tile * BLOCKS
        tl.store(codes + unit, units, mask=there)
        tl.store(scales + block, scale_bits, mask=there)
    decoded = signed_magnitude(code, F) * scale
    if F.family == "int":  # a code of zero has no sign, but −0 is sent without a rest
        decoded = tl.where((v == 0.0) & (scale != 0.0), v, decoded)
    return decoded


@triton.jit
def write_cast(
    v: tl.tensor, codes: tl.tensor, tile: tl.tensor, numel: tl.tensor, F: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """The elements themselves, or their bf16 bits; gaps as zeros."""
    BLOCKS: tl.constexpr = v.shape[0]
    offsets = tl.arange(0, BLOCKS)[:, None] * F.block + tl.arange(0, F.block)[None, :]
    first = tile * (BLOCKS * F.block)
    store_tile(codes + first, offsets, v, offsets < numel - first, True, WHOLE)
    if F.code == "bf16":
        return widened(rounded_bf16(v, True))
    else:
        return v


@triton.jit
def read_cast(
    body: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    BLOCKS: tl.constexpr,
    F: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """The elements of a tile, fp32 [BLOCKS, row]; zero beyond the body. `body`: as in `read_blocks`."""
    offsets = tl.arange(0, BLOCKS)[:, None] * F.block + tl.arange(0, F.block)[None, :]
    first = tile * (BLOCKS * F.block)
    codes = tl.multiple_of(tl.load(body).to(tl.pointer_type(F.unit)), ALIGNMENT)
    return load_tile(codes + first, offsets, offsets < numel - first, WHOLE)


@triton.jit
def read_blocks(
    body: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    BLOCKS: tl.constexpr,
    F: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Signed magnitudes of a tile [BLOCKS, block] and fp32 scales [BLOCKS, 1]; zero beyond the body.

    `body` points at the addresses of codes, bases and scales and at the bits of the weight, all int64.
    """
    block = tl.arange(0, BLOCKS)[:, None]
    unit = block * (F.block // 4) + tl.arange(0, F.block // 4)[None, :]
    codes = tl.load(body).to(tl.pointer_type(F.unit)) + tile * (BLOCKS * F.block // 4)
    scales = tl.load(body + 2).to(tl.pointer_type(F.scale_word)) + tile * BLOCKS
    if WHOLE:
        units = tl.load(codes + unit)
        scale_bits = tl.load(scales + block)
    else:
        there = block < (numel + F.block - 1) // F.block - tile * BLOCKS
        units = tl.load(codes + unit, mask=there, other=0)
        scale_bits = tl.load(scales + block, mask=there, other=0)
    if F.scale == "e4m4":
        base = tl.load(tl.load(body + 1).to(tl.pointer_type(tl.int16)) + tile * (BLOCKS * F.block) // 4096)
        scale = shared_base_value(scale_bits.to(tl.int32), base.to(tl.int32))
    elif F.scale == "fp16":
        scale = scale_bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif F.scale == "bf16":
        scale = widened(scale_bits)
    else:
        scale = float_from(scale_bits)
    return signed_magnitude(unpack(units, F), F), scale
