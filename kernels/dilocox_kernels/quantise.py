"""Block formats in plain torch: scales, codes, and what they decode to."""

import torch
from torch import Tensor

from dilocox_kernels.formats import BINS2_SCALE, CODES, E4M4_MANTISSA_BITS, GROUP_ELEMENTS, BlockFormat, Code

_SHIFT = 23 - E4M4_MANTISSA_BITS
_STEPS = 2047
"""bins2 takes the RMS of |v| / max|v| in such integer steps, whose sum does not depend on its order."""


def quantise(
    fmt: BlockFormat, values: Tensor, real: Tensor, noise: Tensor | None, body: Tensor, numel: int, low: int
) -> Tensor:
    """Encode finite fp32 `values`, elements [low, low + n) of a range of `numel`, into their place in `body`.

    `real` bool [n] marks what is no gap, `noise` fp32 [n] in [0, 1) rounds at random. Returns what a receiver decodes.
    """
    blocks, mask = _in_blocks(fmt, values), _in_blocks(fmt, real)
    parts = fmt.split(body, numel)
    first, last = low // fmt.block_size, low // fmt.block_size + len(blocks)
    wanted = _wanted_scales(fmt, blocks, mask)
    if parts.bases is not None:
        group = low // GROUP_ELEMENTS
        bases, stored = _e4m4(fmt, wanted)
        parts.bases[group : group + len(bases)] = bases
    else:
        stored = _round_up(wanted, fmt.scale_dtype) if CODES[fmt.code].absmax else wanted.to(fmt.scale_dtype)
    parts.scales[first:last] = stored
    scales = read_scales(fmt, parts.bases, parts.scales, first, last)
    negative, index = _codes(CODES[fmt.code], blocks, scales, None if noise is None else _in_blocks(fmt, noise))
    parts.codes[first:last] = _pack(fmt, negative, index)
    return (_signed(CODES[fmt.code], negative, index) * scales).view(-1)[: values.numel()]


def dequantise(fmt: BlockFormat, body: Tensor, numel: int, low: int, high: int, weight: Tensor) -> Tensor:
    """weight · elements [low, high) of a range of `numel`: fp32 [high − low], magnitude · (weight · scale)."""
    parts = fmt.split(body, numel)
    first, last = low // fmt.block_size, fmt.blocks(high)
    negative, index = _unpack(fmt, parts.codes[first:last])
    scales = read_scales(fmt, parts.bases, parts.scales, first, last)
    return (_signed(CODES[fmt.code], negative, index) * (scales * weight)).view(-1)[: high - low]


def read_scales(fmt: BlockFormat, bases: Tensor | None, scales: Tensor, first: int, last: int) -> Tensor:
    """fp32 scales [last − first, 1] of the blocks [first, last) of a body."""
    stored = scales[first:last]
    if bases is None:
        return stored.to(torch.float32).unsqueeze(1)
    group = torch.arange(first, last, device=scales.device) // (GROUP_ELEMENTS // fmt.block_size)
    bits = (bases[group].to(torch.int32) + stored.to(torch.int32)) << _SHIFT
    return torch.where(stored == 0, 0, bits).to(torch.int32).view(torch.float32).unsqueeze(1)


def _in_blocks(fmt: BlockFormat, values: Tensor) -> Tensor:
    missing = -values.numel() % fmt.block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, fmt.block_size)


def _wanted_scales(fmt: BlockFormat, blocks: Tensor, real: Tensor) -> Tensor:
    """fp32 [blocks]: the scales, before they are rounded to what is stored."""
    code = CODES[fmt.code]
    largest = blocks.abs().amax(dim=1)
    if code.absmax:
        # A tensor as divisor: by a number, CUDA multiplies with the reciprocal, which rounds otherwise.
        wanted = largest / torch.full_like(largest, code.top)
    else:
        steps = (blocks.abs() / _or_one(largest).unsqueeze(1) * _STEPS).round().to(torch.int32)
        count = real.sum(dim=1).clamp(min=1)
        mean = steps.square().sum(dim=1).to(torch.float32) / count.to(torch.float32)
        # By way of float64: in fp32, torch's square root on CPUs is that of MKL, which does not round as IEEE asks.
        root = mean.to(torch.float64).sqrt().to(torch.float32)
        wanted = root * (BINS2_SCALE / _STEPS) * largest
    return wanted.clamp(max=fmt.max_scale)


def _round_up(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest values of `dtype` that are not below `wanted`; both are positive."""
    nearest = wanted.to(dtype)
    if dtype == torch.float32:
        return nearest
    below = (nearest.to(torch.float32) < wanted).to(torch.int16)  # the next positive float has the next bits
    return (nearest.view(torch.int16) + below).view(dtype)


def _e4m4(fmt: BlockFormat, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(bases [groups], scales [blocks]): the top bits of fp32 scales, less a base that puts the largest at 255."""
    absmax = CODES[fmt.code].absmax
    top_bits = (wanted.view(torch.int32) + ((1 << _SHIFT) - 1 if absmax else 1 << (_SHIFT - 1))) >> _SHIFT
    per_group = GROUP_ELEMENTS // fmt.block_size
    padded = torch.nn.functional.pad(top_bits, (0, -len(top_bits) % per_group)).view(-1, per_group)
    bases = padded.amax(dim=1) - 255
    codes = top_bits - bases.repeat_interleave(per_group)[: len(top_bits)]
    codes = torch.where(wanted == 0, 0, codes.clamp(min=1 if absmax else 0))
    return bases.to(torch.int16), codes.to(torch.uint8)


def _codes(code: Code, blocks: Tensor, scales: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(negative, index of the magnitude), bool and int64 [blocks, block size]; a scale of zero gives codes of zero."""
    levels = torch.tensor(code.magnitudes, device=blocks.device)
    last = len(code.magnitudes) - 1
    ratio = blocks.abs() / _or_one(scales)
    negative = torch.signbit(blocks)
    lower = (torch.bucketize(ratio, levels, right=True) - 1).clamp_(min=0)
    upper = (lower + 1).clamp_(max=last)
    low, high = levels[lower], levels[upper]
    if noise is None:
        middle = (low + high) / 2
        up = (ratio > middle) | ((ratio == middle) & (lower % 2 == 1))
    else:
        up = noise * (high - low) < ratio - low
        if code.magnitudes[0] > 0:  # between the two smallest values the sign is what is random
            between = ratio < code.magnitudes[0]
            signed = torch.where(negative, -ratio, ratio)
            plus = noise * (2 * code.magnitudes[0]) < signed + code.magnitudes[0]
            negative = torch.where(between, ~plus, negative)
            up &= ~between
    index = torch.where(up, upper, lower)
    empty = scales == 0
    return negative & ~empty, torch.where(empty, 0, index)


def _signed(code: Code, negative: Tensor, index: Tensor) -> Tensor:
    magnitudes = torch.tensor(code.magnitudes, device=index.device)[index]
    return torch.where(negative, -magnitudes, magnitudes)


def _pack(fmt: BlockFormat, negative: Tensor, index: Tensor) -> Tensor:
    """uint8 [blocks, bytes of a block's codes]; the first element in the lowest bits of a byte."""
    bits = CODES[fmt.code].bits
    if fmt.code in ("int4", "int8"):
        fields = torch.where(negative, -index, index) & ((1 << bits) - 1)
    else:
        fields = index | (negative.to(torch.int64) << (bits - 1))
    per_byte = fields.view(len(fields), -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, device=fields.device)
    return (per_byte << shifts).sum(dim=2).to(torch.uint8)


def _unpack(fmt: BlockFormat, packed: Tensor) -> tuple[Tensor, Tensor]:
    bits = CODES[fmt.code].bits
    shifts = torch.arange(0, 8, bits, device=packed.device)
    fields = ((packed.to(torch.int64).unsqueeze(2) >> shifts) & ((1 << bits) - 1)).view(len(packed), -1)
    sign = 1 << (bits - 1)
    negative = fields >= sign
    if fmt.code in ("int4", "int8"):
        return negative, torch.where(negative, 2 * sign - fields, fields)
    return negative, fields & (sign - 1)


def _or_one(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.ones_like(values), values)
