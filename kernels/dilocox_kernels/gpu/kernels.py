"""The four kernels: each reads and writes every element once and holds nothing of the range's size in between.

A program works on one tile. `plan` (int64 [programs, 3]) says which: the tile's number, then, of a whole tile, the
address of its first value, or else the first and the last + 1 of the spans that meet it. `spans` (int64 [spans, 3]):
start, stop, address of the values. `F` is a `Coding`.
"""

import triton
import triton.language as tl

from dilocox_kernels.gpu.bodies import read_blocks, read_cast, write_blocks, write_cast
from dilocox_kernels.gpu.codes import bits_of, float_from
from dilocox_kernels.gpu.philox import uniform
from dilocox_kernels.gpu.streams import load_tile, load_values, real_elements, store_tile, store_values, tile_offsets


@triton.jit
def place(
    plan: tl.tensor, spans: tl.tensor, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """The program's tile, the first element of it, the plan's other two numbers, offsets inside, and which are real."""
    row = plan + 3 * tl.program_id(0)
    tile = tl.load(row)
    first = tl.load(row + 1)
    last = tl.load(row + 2)
    base = tile * (BLOCKS * BLOCK)
    offsets = tile_offsets(BLOCKS, BLOCK)
    if WHOLE:
        real = offsets >= 0
    else:
        real = real_elements(spans, first, last, base, offsets)
    return tile, base, first, last, offsets, real


@triton.jit
def merged(
    bodies: tl.tensor,
    count: tl.tensor,
    tile: tl.tensor,
    numel: tl.tensor,
    real: tl.tensor,
    BLOCKS: tl.constexpr,
    F: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Σ weight · decoded over the bodies in their order, fp32 [BLOCKS, block]; zero where not real."""
    total = tl.zeros([BLOCKS, F.block], tl.float32)
    for k in range(count):
        weight = float_from(tl.load(bodies + 4 * k + 3).to(tl.int32))
        if F.family == "cast":
            total += read_cast(bodies + 4 * k, tile, numel, BLOCKS, F, ALIGNMENT, WHOLE) * weight
        else:
            magnitude, scale = read_blocks(bodies + 4 * k, tile, numel, BLOCKS, F, WHOLE)
            total += magnitude * (scale * weight)
    if not WHOLE:
        total = tl.where(real, total, 0.0)
    return total


@triton.jit
def send(
    delta: tl.tensor,
    real: tl.tensor,
    tile: tl.tensor,
    offsets: tl.tensor,
    residual: tl.tensor,
    decay: tl.tensor,
    start: tl.tensor,
    key: tl.tensor,
    round: tl.tensor,
    codes: tl.tensor,
    bases: tl.tensor,
    scales: tl.tensor,
    residual_out: tl.tensor,
    squares: tl.tensor,
    peaks: tl.tensor,
    numel: tl.tensor,
    F: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Encode Δ + decay · residual of a tile, keep what is not sent, and the tile's share of the norms."""
    BLOCKS: tl.constexpr = delta.shape[0]
    base = tile * (BLOCKS * F.block)
    v = delta
    if residual is not None:
        v = load_tile(residual + base, offsets, real, WHOLE) * decay + delta
    u = v
    if STOCHASTIC:
        u = uniform(start.to(tl.int64) + base, round, key, BLOCKS, F.block)
        if not WHOLE:  # what fills up the last block is not rounded at random
            u = tl.where(offsets < numel - base, u, 0.0)
    if F.family == "cast":
        decoded = write_cast(v, codes, tile, numel, F, WHOLE)
    else:
        decoded = write_blocks(v, real, u, codes, bases, scales, tile, numel, F, STOCHASTIC, WHOLE)
    if residual_out is not None:
        store_tile(residual_out + base, offsets, v - decoded, real, True, WHOLE)
    wide = delta.to(tl.float64)
    tl.store(squares + tile, tl.sum(wide * wide))
    tl.store(peaks + 2 * tile, tl.max(bits_of(tl.abs(delta))))
    tl.store(peaks + 2 * tile + 1, tl.max(bits_of(tl.abs(v))))


@triton.jit
def encode(
    plan: tl.tensor,
    spans: tl.tensor,
    anchor: tl.tensor,
    residual: tl.tensor,
    decay: tl.float32,
    start: tl.int64,
    key: tl.uint64,
    round: tl.uint32,
    codes: tl.tensor,
    bases: tl.tensor,
    scales: tl.tensor,
    residual_out: tl.tensor,
    squares: tl.tensor,
    peaks: tl.tensor,
    numel: tl.int64,
    F: tl.constexpr,
    VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Δ = anchor − value, or the value where there is no anchor; then `send`."""
    tile, base, first, last, offsets, real = place(plan, spans, BLOCKS, F.block, WHOLE)
    delta = load_values(spans, first, last, base, offsets, VALUE, ALIGNED, WHOLE)
    if anchor is not None:
        delta = load_tile(anchor + base, offsets, real, WHOLE) - delta
    send(
        delta, real, tile, offsets, residual, decay, start, key, round, codes, bases, scales, residual_out, squares,
        peaks, numel, F, STOCHASTIC, WHOLE,
    )  # fmt: skip


@triton.jit
def requantise(
    plan: tl.tensor,
    spans: tl.tensor,
    bodies: tl.tensor,
    count: tl.int32,
    residual: tl.tensor,
    decay: tl.float32,
    start: tl.int64,
    key: tl.uint64,
    round: tl.uint32,
    codes: tl.tensor,
    bases: tl.tensor,
    scales: tl.tensor,
    residual_out: tl.tensor,
    squares: tl.tensor,
    peaks: tl.tensor,
    numel: tl.int64,
    F: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Δ = the merge of the bodies; then `send`."""
    tile, _base, _first, _last, offsets, real = place(plan, spans, BLOCKS, F.block, WHOLE)
    delta = merged(bodies, count, tile, numel, real, BLOCKS, F, ALIGNMENT, WHOLE)
    send(
        delta, real, tile, offsets, residual, decay, start, key, round, codes, bases, scales, residual_out, squares,
        peaks, numel, F, STOCHASTIC, WHOLE,
    )  # fmt: skip


@triton.jit
def decode_accumulate(
    plan: tl.tensor,
    spans: tl.tensor,
    bodies: tl.tensor,
    count: tl.int32,
    out: tl.tensor,
    numel: tl.int64,
    F: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """out = the merge of the bodies, zero in gaps."""
    tile, base, _first, _last, offsets, real = place(plan, spans, BLOCKS, F.block, WHOLE)
    total = merged(bodies, count, tile, numel, real, BLOCKS, F, ALIGNMENT, WHOLE)
    real = offsets < numel - base
    store_tile(out + base, offsets, total, real, False, WHOLE)


@triton.jit
def outer_step(
    plan: tl.tensor,
    spans: tl.tensor,
    bodies: tl.tensor,
    count: tl.int32,
    anchor: tl.tensor,
    momentum: tl.tensor,
    lr: tl.float32,
    mu: tl.float32,
    local_weight: tl.float32,
    anchor_weight: tl.float32,
    start: tl.int64,
    checksums: tl.tensor,
    numel: tl.int64,
    F: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RULE: tl.constexpr,
    MIX: tl.constexpr,
    VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Merge, step the anchor, write the local values, and the tile's share of the new anchor's checksum."""
    tile, base, first, last, offsets, real = place(plan, spans, BLOCKS, F.block, WHOLE)
    step = merged(bodies, count, tile, numel, real, BLOCKS, F, ALIGNMENT, WHOLE)
    if RULE != "SGD":
        speed = load_tile(momentum + base, offsets, real, WHOLE) * mu + step
        store_tile(momentum + base, offsets, speed, real, False, WHOLE)
        if RULE == "NESTEROV":
            step = step + speed * mu
        else:
            step = speed
    a = load_tile(anchor + base, offsets, real, WHOLE) - step * lr
    store_tile(anchor + base, offsets, a, real, False, WHOLE)
    local = a
    if MIX:
        local = load_values(spans, first, last, base, offsets, VALUE, ALIGNED, WHOLE) * local_weight + a * anchor_weight
    store_values(spans, first, last, base, offsets, local, VALUE, ALIGNED, WHOLE)

    # Outside spans everything was loaded as zero, so a is +0 and counts nothing.
    word = bits_of(a).to(tl.uint32, bitcast=True)
    position = (start.to(tl.int64) + base).to(tl.uint32) + offsets.to(tl.uint32)
    product = word.to(tl.uint64) * (position * 2 + 1).to(tl.uint64)
    tl.store(checksums + tile, tl.sum(product).to(tl.int64, bitcast=True))
