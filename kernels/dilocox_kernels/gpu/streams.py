"""How a tile of a flat range meets memory.

A tile is a power of two of elements, [blocks, block] in registers. A *whole* tile lies inside one span whose tensor is
there at 16-byte alignment: loads and stores have no mask and are 16 bytes wide. Any other tile goes over the spans that
meet it, with masks. Half-width floats travel as int16 and are rounded here, so that every back end rounds alike.
"""

import triton
import triton.language as tl

from dilocox_kernels.gpu.codes import bits_of, float_from


@triton.jit
def tile_offsets(BLOCKS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """int32 [BLOCKS, BLOCK]: 0, 1, 2 … row by row."""
    return tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def rounded_bf16(x: tl.tensor, SATURATE: tl.constexpr) -> tl.tensor:
    """int16 bits of fp32 rounded to nearest even; beyond the largest finite: that, or infinity. NaN stays NaN."""
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    nearest = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    if SATURATE:
        nearest = tl.minimum(nearest, 0x7F7F)
    else:
        nearest = tl.where(magnitude > 0x7F800000, 0x7FC0, nearest)
    return (nearest | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def widened(x: tl.tensor) -> tl.tensor:
    """fp32 of fp32, fp16, or the int16 bits of bf16."""
    if x.dtype == tl.int16:
        return float_from(x.to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def narrowed(x: tl.tensor, dtype: tl.constexpr, SATURATE: tl.constexpr) -> tl.tensor:
    """The reverse of `widened`."""
    if dtype == tl.int16:
        return rounded_bf16(x, SATURATE)
    else:
        return x.to(dtype)


@triton.jit
def load_tile(pointer: tl.tensor, offsets: tl.tensor, real: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """fp32 elements at `pointer` + offsets; zero where `real` is false, which is not read. WHOLE: all are real."""
    if WHOLE:
        return widened(tl.load(pointer + offsets))
    else:
        return widened(tl.load(pointer + offsets, mask=real, other=0))


@triton.jit
def store_tile(
    pointer: tl.tensor,
    offsets: tl.tensor,
    x: tl.tensor,
    real: tl.tensor,
    SATURATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Write fp32 x in the pointer's dtype where `real`; WHOLE: everywhere."""
    x = narrowed(x, pointer.dtype.element_ty, SATURATE)
    if WHOLE:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=real)


@triton.jit
def real_elements(
    spans: tl.tensor, first: tl.tensor, last: tl.tensor, base: tl.tensor, offsets: tl.tensor
) -> tl.tensor:
    """bool: which elements of the tile at `base` lie in one of the spans first … last − 1, rows of `spans`."""
    real = offsets < 0
    for i in range(first, last):
        start = tl.load(spans + 3 * i) - base
        stop = tl.load(spans + 3 * i + 1) - base
        real = real | ((offsets >= start) & (offsets < stop))
    return real


@triton.jit
def load_values(
    spans: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    base: tl.tensor,
    offsets: tl.tensor,
    VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """fp32 values of a tile; `first` of a whole tile is the address of its first value. Zero outside spans."""
    if WHOLE:
        return load_tile(tl.multiple_of(first.to(tl.pointer_type(VALUE)), ALIGNED), offsets, offsets >= 0, WHOLE)
    else:
        value = tl.zeros(offsets.shape, tl.float32)
        for i in range(first, last):
            start = tl.load(spans + 3 * i) - base
            stop = tl.load(spans + 3 * i + 1) - base
            here = (offsets >= start) & (offsets < stop)
            pointer = tl.load(spans + 3 * i + 2).to(tl.pointer_type(VALUE)) - start
            value = tl.where(here, load_tile(pointer, offsets, here, WHOLE), value)
        return value


@triton.jit
def store_values(
    spans: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    base: tl.tensor,
    offsets: tl.tensor,
    x: tl.tensor,
    VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """The reverse of `load_values`, rounded to nearest even; too large becomes infinity."""
    if WHOLE:
        store_tile(tl.multiple_of(first.to(tl.pointer_type(VALUE)), ALIGNED), offsets, x, offsets >= 0, False, WHOLE)
    else:
        for i in range(first, last):
            start = tl.load(spans + 3 * i) - base
            stop = tl.load(spans + 3 * i + 1) - base
            here = (offsets >= start) & (offsets < stop)
            pointer = tl.load(spans + 3 * i + 2).to(tl.pointer_type(VALUE)) - start
            store_tile(pointer, offsets, x, here, False, WHOLE)
