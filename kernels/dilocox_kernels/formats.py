"""Formats: what the bytes of an encoded range mean, written out in plain torch.

A format turns fp32 values into bytes and back, chunk by chunk, without state. Error feedback, norms and the walk over
chunks are the same for all formats (`reference.py`); a faster back end has to write the same bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

BLOCK_SIZES = (32, 64, 128, 256)
SCALE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CAST_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Format(Protocol):
    @property
    def name(self) -> str:
        """As used in records."""

    @property
    def alignment(self) -> int:
        """Elements that are encoded together; ranges and chunks start at multiples of it."""

    def encoded_bytes(self, numel: int) -> int:
        """Size of the body of `numel` elements."""

    def write(self, values: Tensor, start: int, body: Tensor, numel: int) -> Tensor:
        """Encode finite fp32 `values`, elements [start, start + n) of a range of `numel`, into their place in `body`.

        Returns what a receiver decodes, fp32 [n].
        """

    def read(self, body: Tensor, start: int, stop: int, numel: int) -> Tensor:
        """Decode elements [start, stop) of a range of `numel`: fp32 [stop − start]."""


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
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return CAST_DTYPES[self.dtype_name]

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def write(self, values: Tensor, start: int, body: Tensor, numel: int) -> Tensor:
        largest = torch.finfo(self.dtype).max
        cast = values.clamp(-largest, largest).to(self.dtype)
        body.view(self.dtype)[start : start + values.numel()] = cast
        return cast.to(torch.float32)

    def read(self, body: Tensor, start: int, stop: int, numel: int) -> Tensor:
        return body.view(self.dtype)[start:stop].to(torch.float32)


@dataclass(frozen=True)
class BlockFormat:
    """Symmetric absmax codes of `bits` bits in blocks that share a scale: value ≈ code · scale.

    scale = the smallest value of the scale dtype that is not below fp32(max|v| / c), c = 7 (int4) or 127 (int8), at
    most `max_scale`; code = v / scale rounded to nearest even, kept in −c … c. So no value is more than scale / 2 away
    from its code as long as max|v| ≤ c · max_scale; beyond that codes stay at ±c. A block whose scale is zero (all
    zeros, or so small that max|v| / c is zero in fp32) has codes of zero.
    Body: the codes of all blocks, the last one filled up with zeros, then the scales of all blocks.
    """

    bits: int
    block_size: int
    scale_dtype_name: str

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits!r}: expected 4 or 8")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size={self.block_size!r}: expected one of {BLOCK_SIZES}")
        if self.scale_dtype_name not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype={self.scale_dtype_name!r}: expected one of {', '.join(SCALE_DTYPES)}")

    @property
    def name(self) -> str:
        return f"int{self.bits}/{self.block_size}/{self.scale_dtype_name}"

    @property
    def alignment(self) -> int:
        return self.block_size

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_dtype_name]

    @property
    def code_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def code_bytes(self) -> int:
        """Of one block."""
        return self.block_size * self.bits // 8

    @property
    def bits_per_parameter(self) -> float:
        """Of whole blocks: codes and scales."""
        return 8 * self.encoded_bytes(self.block_size) / self.block_size

    @cached_property
    def max_scale(self) -> float:
        """Largest scale: finite, and so that code · scale is finite in fp32."""
        largest = min(torch.finfo(self.scale_dtype).max, _FLOAT32_MAX / self.code_max)
        scale = torch.tensor(largest, dtype=torch.float64).to(self.scale_dtype)
        if scale.item() * self.code_max > _FLOAT32_MAX:
            scale = torch.nextafter(scale, torch.zeros_like(scale))
        return scale.item()

    def encoded_bytes(self, numel: int) -> int:
        return self.blocks(numel) * (self.code_bytes + self.scale_dtype.itemsize)

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def split(self, body: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Views of a body: uint8 codes [blocks, code bytes] and scales [blocks, 1]."""
        end_of_codes = self.blocks(numel) * self.code_bytes
        return body[:end_of_codes].view(-1, self.code_bytes), body[end_of_codes:].view(self.scale_dtype).view(-1, 1)

    def write(self, values: Tensor, start: int, body: Tensor, numel: int) -> Tensor:
        blocks = self._in_blocks(values)
        scale = self._scales(blocks)
        codes = self._quantise(blocks, scale)
        first, last = start // self.block_size, start // self.block_size + len(blocks)
        all_codes, all_scales = self.split(body, numel)
        all_codes[first:last] = codes.view(torch.uint8) if self.bits == 8 else _pack_nibbles(codes)
        all_scales[first:last] = scale
        return _dequantise(codes, scale)[: values.numel()]

    def read(self, body: Tensor, start: int, stop: int, numel: int) -> Tensor:
        first, last = start // self.block_size, self.blocks(stop)
        all_codes, all_scales = self.split(body, numel)
        packed = all_codes[first:last]
        codes = packed.view(torch.int8) if self.bits == 8 else _unpack_nibbles(packed)
        return _dequantise(codes, all_scales[first:last])[: stop - start]

    def _in_blocks(self, values: Tensor) -> Tensor:
        missing = -values.numel() % self.block_size
        return torch.nn.functional.pad(values, (0, missing)).view(-1, self.block_size)

    def _scales(self, blocks: Tensor) -> Tensor:
        largest = blocks.abs().amax(dim=1, keepdim=True)
        # A tensor as divisor: by a number, CUDA multiplies with the reciprocal, which rounds otherwise.
        wanted = (largest / torch.full_like(largest, self.code_max)).clamp_(max=self.max_scale)
        nearest = wanted.to(self.scale_dtype)
        if self.scale_dtype == torch.float32:
            return nearest
        one_up = (nearest.to(torch.float32) < wanted).to(
            torch.int16
        )  # the next value of a positive float: its bits + 1
        return (nearest.view(torch.int16) + one_up).view(self.scale_dtype)

    def _quantise(self, blocks: Tensor, scale: Tensor) -> Tensor:
        divisor = scale.to(torch.float32)
        divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        return (blocks / divisor).round_().clamp_(-self.code_max, self.code_max).to(torch.int8)


def _dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(torch.float32).mul_(scale.to(torch.float32)).view(-1)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """int8 [blocks, n] in −8 … 7 → uint8 [blocks, n / 2], two's complement, the first code in the low nibble."""
    pairs = codes.view(torch.int16)  # low byte: first code
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    pairs = packed.to(torch.int16)
    nibbles = ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.int8)
    return (nibbles ^ 8).sub_(8)
