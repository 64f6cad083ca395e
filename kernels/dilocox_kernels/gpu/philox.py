"""Random numbers of stochastic rounding: Philox4x32-10, a function of key, round and position alone."""

import triton
import triton.language as tl


@triton.jit
def uniform(first: tl.tensor, round: tl.tensor, key: tl.tensor, BLOCKS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """fp32 [BLOCKS, BLOCK] in [0, 1), multiples of 2⁻²⁴, for the positions from `first` (int64, a multiple of 4) on."""
    row = tl.arange(0, BLOCKS)[:, None] * (BLOCK // 4)
    counter = first // 4 + (row + tl.arange(0, BLOCK // 4)[None, :]).to(tl.int64)
    low = counter.to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(key, low, (counter >> 32).to(tl.uint32), zero + round.to(tl.uint32), zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS, BLOCK])
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8
