"""The formats once more, in numpy and plain integers, independent of torch; and ranges that try them hard."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Floats = npt.NDArray[np.float32]
FLOAT32_MAX = 3.4028234663852886e38
AWKWARD = (0.0, -0.0, 1e-45, -3e-45, 1e-39, 5.9e-8, -6.1e-5, 0.5, -7.0, 65504.0, 458529.0, 8.4e6, -1e30, FLOAT32_MAX)


class Encoded(NamedTuple):
    body: bytes
    scales: Floats
    """fp32 [blocks]"""
    decoded: Floats
    """fp32 [n]"""


def block(values: Floats, bits: int, block_size: int, scale_dtype: str) -> Encoded:
    code_max = 2 ** (bits - 1) - 1
    padded = np.pad(values, (0, -len(values) % block_size)).reshape(-1, block_size)
    wanted = np.abs(padded).max(axis=1) / np.float32(code_max)
    scales, scale_bytes = {"fp16": _up_to_fp16, "bf16": _up_to_bf16, "fp32": _fp32}[scale_dtype](wanted, code_max)
    divisor = np.where(scales == 0, np.float32(1), scales)[:, None]
    codes = np.clip(np.rint(padded / divisor), -code_max, code_max).astype(np.int64)
    decoded = codes.astype(np.float32) * scales[:, None]
    flat = [int(code) % 2**bits for code in codes.reshape(-1)]
    packed = bytes(flat) if bits == 8 else bytes(a + 16 * b for a, b in zip(flat[::2], flat[1::2], strict=True))
    return Encoded(packed + scale_bytes, scales, decoded.reshape(-1)[: len(values)])


def _up_to_fp16(wanted: Floats, code_max: int) -> tuple[Floats, bytes]:
    wanted = np.minimum(wanted, np.float32(65504))
    near = wanted.astype(np.float16)
    with np.errstate(over="ignore"):  # the largest has no next one, and needs none
        up = np.nextafter(near, np.float16(np.inf))
    scales = np.where(near.astype(np.float32) < wanted, up, near)
    return scales.astype(np.float32), scales.astype("<f2").tobytes()


def _up_to_bf16(wanted: Floats, code_max: int) -> tuple[Floats, bytes]:
    largest = next(top for top in range(0x7F7F, 0, -1) if code_max * float(_widen(top)) <= FLOAT32_MAX)
    tops = np.minimum((wanted.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16, largest).astype(np.uint32)
    return (tops << 16).astype(np.uint32).view(np.float32), tops.astype("<u2").tobytes()


def _widen(top: int) -> np.float32:
    return np.array([top << 16], dtype=np.uint32).view(np.float32)[0]


def _fp32(wanted: Floats, code_max: int) -> tuple[Floats, bytes]:
    largest = np.float32(FLOAT32_MAX / code_max)
    if code_max * float(largest) > FLOAT32_MAX:
        largest = np.nextafter(largest, np.float32(0))
    scales = np.minimum(wanted, largest)
    return scales, scales.astype("<f4").tobytes()


@st.composite
def ranges(draw: st.DrawFn, max_size: int = 400) -> Floats:
    """Finite fp32 ranges: noise of any magnitude, zero stretches and awkward values in between."""
    size = draw(st.integers(1, max_size))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    magnitude = 10.0 ** draw(st.integers(-45, 36))
    values = (generator.standard_normal(size) * magnitude).astype(np.float32)
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        values[start : start + draw(st.integers(1, size))] = 0
    for position, value in draw(
        st.dictionaries(st.integers(0, size - 1), st.sampled_from(AWKWARD), max_size=6)
    ).items():
        values[position] = value
    return values
