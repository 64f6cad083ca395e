"""A checksum that islands and replicas compare after every sync, and that guards messages."""

import torch
from torch import Tensor

from dilocox_kernels.cpu import library

MODULUS = 1 << 64
_POSITIONS = 1 << 31  # after so many words the weights 2i+1 mod 2^32 start over
_CHUNK_WORDS = 1 << 22  # few launches, 32 MiB of scratch


def checksum64(tensor: Tensor, start: int = 0) -> int:
    """Σ wᵢ · (2(start+i)+1 mod 2³²) mod 2⁶⁴ over the 32-bit words wᵢ of `tensor`.

    `tensor` is 1-D and contiguous: float32 (a word an element) or uint8 (little-endian words, the last filled up with
    zeros). `start` is the position of its first word. Additive: the checksums of ranges that follow each other add up
    (mod 2⁶⁴) to that of the whole. Any one changed bit and any two swapped words change it. Integer arithmetic: the
    same on every device and at any number of threads. Raises ValueError for other tensors, and BackendError for one in
    host memory if the library of the CPU back end is not built.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            f"checksum64 takes 1-D contiguous float32 or uint8, got {list(tensor.shape)} {tensor.dtype} "
            f"with strides {tensor.stride()}; pass tensor.reshape(-1) of a supported dtype"
        )
    if tensor.device.type != "cpu":
        return _by_torch(tensor, start)
    size = tensor.numel() * tensor.element_size()
    return library.load().checksum(tensor.data_ptr(), size, start % _POSITIONS, torch.get_num_threads())


def _by_torch(tensor: Tensor, start: int) -> int:
    """`checksum64` on any device."""
    if tensor.dtype == torch.float32:
        return _weighted_sum(tensor.view(torch.uint32), start) % MODULUS
    if tensor.storage_offset() % 4:
        tensor = tensor.clone()
    whole = tensor.numel() // 4
    tail = torch.zeros(4, dtype=torch.uint8, device=tensor.device)
    tail[: tensor.numel() - 4 * whole] = tensor[4 * whole :]
    words = tensor[: 4 * whole].view(torch.uint32)
    return (_weighted_sum(words, start) + _weighted_sum(tail.view(torch.uint32), start + whole)) % MODULUS


def _weighted_sum(words: Tensor, start: int) -> int:
    """Chunk by chunk, each without a jump of the weights: Σ w·(first + 2i) = first · Σ w + 2 · Σ i·w."""
    index = torch.arange(min(_CHUNK_WORDS, words.numel()), device=words.device)
    total = done = 0
    while done < words.numel():
        position = (start + done) % _POSITIONS
        length = min(_CHUNK_WORDS, words.numel() - done, _POSITIONS - position)
        part = words[done : done + length].to(torch.int64)
        plain = int(part.sum())
        by_index = int(part.mul_(index[:length]).sum())  # wraps mod 2^64, as it should
        total += (2 * position + 1) * plain + 2 * by_index
        done += length
    return total
