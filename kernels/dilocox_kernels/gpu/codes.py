"""Codes on the device: magnitudes, rounding, packing. Every operation rounds once, as in the reference."""

import triton
import triton.language as tl


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """int32 bits of fp32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_from(bits: tl.tensor) -> tl.tensor:
    """fp32 with these int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to_integer(x: tl.tensor) -> tl.tensor:
    """int32, ties to even, of 0 ≤ x < 2²²: x + 2²³ has no bits behind the point. A NaN gives some number."""
    return bits_of(x + 8388608.0) & 0x3FFFFF


@triton.jit
def signed_magnitude(code: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """fp32 value of code words under scale 1; `code` int32, bits above F.bits are zero."""
    if F.family == "int":  # 2²³ + (code + half) has the code in its lowest bits: no conversion
        return float_from((code ^ F.half) | 0x4B000000) - (8388608.0 + F.half)
    elif F.family == "float":  # exponent and mantissa in their place, with fp32's bias taken back by a product
        return float_from(((code & 7) << F.shift) | ((code & 8) << 28)) * F.unbias
    else:  # 1 or 3.34375
        return float_from((0x3F800000 + (code & 1) * 0x00D60000) | ((code & 2) << 30))


@triton.jit
def nearest_index(y: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Index of the level nearest to y ≥ 0, ties to the even index."""
    y = tl.minimum(y, F.top)
    if F.family == "int":
        return round_to_integer(y)
    else:
        bits = bits_of(y)
        halfway: tl.constexpr = (1 << (F.shift - 1)) - 1
        normal = ((bits + halfway + ((bits >> F.shift) & 1)) >> F.shift) - F.first_exponent
        return tl.where(y < F.first_normal, round_to_integer(y * F.per_step), normal)


@triton.jit
def chance_index(y: tl.tensor, u: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Index of one of the two levels around y, the upper one with the chance that makes the mean y."""
    nearest = nearest_index(y, F)
    lower = nearest - (signed_magnitude(nearest, F) > y).to(tl.int32)
    upper = tl.minimum(lower + 1, F.last)
    low = signed_magnitude(lower, F)
    return tl.where(u * (signed_magnitude(upper, F) - low) < y - low, upper, lower)


@triton.jit
def bins_code(v: tl.tensor, y: tl.tensor, u: tl.tensor, F: tl.constexpr, STOCHASTIC: tl.constexpr) -> tl.tensor:
    """sign << 1 | index of the two magnitudes 1 and 3.34375."""
    sign = (bits_of(v) >> 31) & 1
    if STOCHASTIC:
        x = float_from(bits_of(y) | (sign << 31))
        between = tl.where(u * 2.0 < x + 1.0, 0, 2)  # 1 or −1
        beyond = (sign << 1) | (u * 2.34375 < y - 1.0).to(tl.int32)
        return tl.where(y < 1.0, between, beyond)
    else:
        return (sign << 1) | (y > 2.171875).to(tl.int32)


@triton.jit
def quantise(v: tl.tensor, scale: tl.tensor, u: tl.tensor, F: tl.constexpr, STOCHASTIC: tl.constexpr) -> tl.tensor:
    """int32 codes [blocks, block] of v under scale [blocks, 1], bits above F.bits zero; zero where the scale is."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    y = tl.div_rn(tl.abs(v), tl.broadcast_to(divisor, v.shape))
    if F.family == "bins":
        code = bins_code(v, y, u, F, STOCHASTIC)
    else:
        if STOCHASTIC:
            index = chance_index(y, u, F)
        else:
            index = nearest_index(y, F)
        if F.family == "int":
            code = tl.where(v < 0.0, -index, index) & F.mask
        else:
            code = index | ((bits_of(v) >> 28) & 8)
    return tl.where(scale == 0.0, 0, code)


@triton.jit
def pack(code: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """int32 codes [blocks, block] to units of four codes [blocks, block / 4], the first code lowest."""
    quads = tl.reshape(code, [code.shape[0], F.block // 4, 2, 2])
    even, odd = tl.split(quads)
    low, high = tl.split(even | (odd << F.bits))
    return (low | (high << (2 * F.bits))).to(F.unit)


@triton.jit
def unpack(units: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """The reverse of `pack`."""
    unit = units.to(tl.int32)
    pair = tl.join(unit, unit >> (2 * F.bits))
    quads = tl.join(pair, pair >> F.bits)
    return tl.reshape(quads, [units.shape[0], F.block]) & F.mask
