"""Philox4x32-10, a counter-based random number generator (Salmon et al. 2011, "Parallel random numbers"), in torch."""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(key: int, round: int, positions: Tensor) -> Tensor:
    """Random 32-bit words, as int64, for int64 `positions` [n].

    Word position % 4 of the block at counter (low and high half of position // 4, round, 0) under the two halves of
    `key`.
    """
    block = positions // 4
    counter = [block & _WORD, block >> 32, torch.full_like(block, round), torch.zeros_like(block)]
    keys = [key & _WORD, key >> 32]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (
            _multiply(word, multiplier) for word, multiplier in zip(counter[::2], _MULTIPLIERS, strict=True)
        )
        counter = [high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0]
        keys = [(part + step) & _WORD for part, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(counter, dim=1).gather(1, (positions % 4).unsqueeze(1)).squeeze(1)


def uniform(key: int, round: int, positions: Tensor) -> Tensor:
    """fp32 numbers in [0, 1), multiples of 2⁻²⁴."""
    return (philox(key, round, positions) >> 8).to(torch.float32) * 2.0**-24


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two unsigned 32-bit numbers; int64 holds it modulo 2⁶⁴, all of it."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD
