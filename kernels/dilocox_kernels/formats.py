"""Formats: what the bytes of an encoded range mean. Byte by byte in kernels/README.md."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZES = (32, 64, 128, 256)
GROUP_ELEMENTS = 4096
"""Elements whose e4m4 scales share a base; ranges are worked on in tiles of so many."""
CAST_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "e4m4": torch.uint8}
E4M4_MANTISSA_BITS = 4
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Code(NamedTuple):
    """The values that an element can take: ± a magnitude, times its block's scale."""

    bits: int
    magnitudes: tuple[float, ...]
    """Ascending, each exact in fp32."""
    absmax: bool
    """The scale puts the block's largest element on the largest magnitude; else it follows the block's RMS."""

    @property
    def top(self) -> float:
        return self.magnitudes[-1]


CODES = {
    "int8": Code(8, tuple(float(code) for code in range(128)), absmax=True),
    "int4": Code(4, tuple(float(code) for code in range(8)), absmax=True),
    "e2m1": Code(4, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), absmax=True),
    "e3m0": Code(4, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), absmax=True),
    # The best four levels for a normal distribution are ±0.4528 σ and ±1.5104 σ (Lloyd 1982, Max 1960): 1 : 3.34.
    "bins2": Code(2, (1.0, 3.34375), absmax=False),
}
BINS2_SCALE = 0.4528
"""Scale of bins2 over the block's RMS."""


class Parts(NamedTuple):
    """Views of the body of a block format."""

    codes: Tensor
    """uint8 [blocks, bytes of a block's codes]"""
    bases: Tensor | None
    """int16 [groups], for e4m4 scales only"""
    scales: Tensor
    """[blocks], of the scale's dtype"""


@dataclass(frozen=True)
class CastFormat:
    """Elements rounded to nearest even in another dtype; what exceeds its range becomes its largest finite value."""

    dtype_name: str

    def __post_init__(self) -> None:
        if self.dtype_name not in CAST_DTYPES:
            raise ValueError(f"dtype={self.dtype_name!r}: expected one of {', '.join(CAST_DTYPES)}")

    @property
    def name(self) -> str:
        return self.dtype_name

    @property
    def alignment(self) -> int:
        """Elements that are encoded together; spans start at multiples of it."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return CAST_DTYPES[self.dtype_name]

    def encoded_bytes(self, numel: int) -> int:
        """Size of the body of `numel` elements."""
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class BlockFormat:
    """Codes of a few bits in blocks that share a scale: value ≈ ± magnitude · scale.

    `code` is a key of CODES, `scale` of SCALE_DTYPES. Body: the codes of all blocks, the last block filled up with
    zeros; for e4m4 the bases of all groups; the scales of all blocks.
    """

    code: str
    block_size: int
    scale: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"code={self.code!r}: expected one of {', '.join(CODES)}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size={self.block_size!r}: expected one of {BLOCK_SIZES}")
        if self.scale not in SCALE_DTYPES:
            raise ValueError(f"scale={self.scale!r}: expected one of {', '.join(SCALE_DTYPES)}")

    @property
    def name(self) -> str:
        return f"{self.code}/{self.block_size}/{self.scale}"

    @property
    def alignment(self) -> int:
        """Elements that are encoded together; spans start at multiples of it."""
        return self.block_size

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale]

    @property
    def shares_base(self) -> bool:
        """Scales are 8-bit numbers relative to a base that a group of blocks shares."""
        return self.scale == "e4m4"

    @property
    def code_bytes(self) -> int:
        """Of one block."""
        return self.block_size * CODES[self.code].bits // 8

    @property
    def bits_per_parameter(self) -> float:
        """Of whole groups: codes, scales and bases."""
        return 8 * self.encoded_bytes(GROUP_ELEMENTS) / GROUP_ELEMENTS

    @cached_property
    def max_scale(self) -> float:
        """Largest scale: finite, and so that magnitude · scale is finite in fp32."""
        top = CODES[self.code].top
        if self.shares_base:
            largest = torch.tensor(_FLOAT32_MAX / top, dtype=torch.float32).view(torch.int32)
            return ((largest >> 19) << 19).view(torch.float32).item()
        limit = min(torch.finfo(self.scale_dtype).max, _FLOAT32_MAX / top)
        scale = torch.tensor(limit, dtype=torch.float64).to(self.scale_dtype)
        if scale.item() * top > _FLOAT32_MAX:
            scale = torch.nextafter(scale, torch.zeros_like(scale))
        return scale.item()

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def groups(self, numel: int) -> int:
        """Bases in the body of `numel` elements."""
        return -(-numel // GROUP_ELEMENTS) if self.shares_base else 0

    def encoded_bytes(self, numel: int) -> int:
        """Size of the body of `numel` elements."""
        return self.blocks(numel) * (self.code_bytes + self.scale_dtype.itemsize) + 2 * self.groups(numel)

    def split(self, body: Tensor, numel: int) -> Parts:
        """Views of a body, without a copy; its start must be aligned to 4 bytes."""
        codes = self.blocks(numel) * self.code_bytes
        bases = codes + 2 * self.groups(numel)
        return Parts(
            body[:codes].view(-1, self.code_bytes),
            body[codes:bases].view(torch.int16) if self.shares_base else None,
            body[bases:].view(self.scale_dtype),
        )


Format = BlockFormat | CastFormat
