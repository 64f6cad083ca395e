"""What kernels know of a format while they are compiled."""

from dataclasses import dataclass

import triton.language as tl

from dilocox_kernels.formats import BINS2_SCALE, CODES, BlockFormat, Format

CAST_ROW = 256
"""Elements of a row of a tile for formats without blocks."""

_SCALE_WORDS = {"fp16": tl.int16, "bf16": tl.int16, "fp32": tl.int32, "e4m4": tl.uint8}
_UNITS = {"int8": tl.int32, "int4": tl.int16, "e2m1": tl.int16, "e3m0": tl.int16, "bins2": tl.uint8}
_UNITS |= {"fp32": tl.float32, "bf16": tl.int16}


@dataclass(frozen=True)
class Coding:
    """A format as a compile-time constant: its name and the numbers that follow from it."""

    code: str
    block: int
    scale: str
    max_scale: float

    @property
    def family(self) -> str:
        """How codes become magnitudes."""
        return {"int8": "int", "int4": "int", "e2m1": "float", "e3m0": "float", "bins2": "bins"}.get(self.code, "cast")

    @property
    def bits(self) -> int:
        return CODES[self.code].bits

    @property
    def unit(self) -> tl.dtype:
        """What holds four codes, or one element of a cast: what a body is read and written in."""
        return _UNITS[self.code]

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def half(self) -> int:
        """2 ** (bits − 1): two's complement plus this is unsigned."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> float:
        return CODES[self.code].top

    @property
    def last(self) -> int:
        """Index of the largest magnitude."""
        return len(CODES[self.code].magnitudes) - 1

    @property
    def shift(self) -> int:
        """Where the lowest bit of an index sits in an fp32: 23 − mantissa bits."""
        return 23 - int(self.code[-1])

    @property
    def first_normal(self) -> float:
        """From here on a level's index is the upper bits of its fp32, less an offset."""
        return {"e2m1": 1.0, "e3m0": 0.25}[self.code]

    @property
    def per_step(self) -> float:
        """1 / the distance of levels below `first_normal`."""
        return {"e2m1": 2.0, "e3m0": 4.0}[self.code]

    @property
    def first_exponent(self) -> int:
        """That offset."""
        return {"e2m1": 252, "e3m0": 124}[self.code]

    @property
    def unbias(self) -> float:
        """What an index in the upper bits of an fp32 is to be multiplied by."""
        return {"e2m1": 2.0**126, "e3m0": 2.0**124}[self.code]

    @property
    def bins_factor(self) -> float:
        return BINS2_SCALE / 2047

    @property
    def round_up(self) -> bool:
        """Whether a stored scale must not be below the wanted one."""
        return CODES[self.code].absmax

    @property
    def scale_word(self) -> tl.dtype:
        return _SCALE_WORDS[self.scale]


def coding(fmt: Format) -> Coding:
    """The constants of `fmt`."""
    if isinstance(fmt, BlockFormat):
        return Coding(fmt.code, fmt.block_size, fmt.scale, fmt.max_scale)
    return Coding(fmt.dtype_name, CAST_ROW, "none", 0.0)
