"""The formats once more, in numpy and plain integers, independent of torch; and ranges that try them hard."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Floats = npt.NDArray[np.float32]
FLOAT32_MAX = 3.4028234663852886e38
AWKWARD = (0.0, -0.0, 1e-45, -3e-45, 1e-39, 5.9e-8, -6.1e-5, 0.5, -7.0, 65504.0, 458529.0, 8.4e6, -1e30, FLOAT32_MAX)
MAGNITUDES = {
    "int8": [float(code) for code in range(128)],
    "int4": [float(code) for code in range(8)],
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e3m0": [0, 0.25, 0.5, 1, 2, 4, 8, 16],
    "bins2": [1, 3.34375],
}
BITS = {"int8": 8, "int4": 4, "e2m1": 4, "e3m0": 4, "bins2": 2}
_GROUP = 4096


class Encoded(NamedTuple):
    body: bytes
    scales: Floats
    """fp32 [blocks]"""
    decoded: Floats
    """fp32 [n]"""


def block(values: Floats, code: str, block_size: int, scale: str) -> Encoded:
    """A range without gaps, rounded to nearest."""
    padded = np.pad(values, (0, -len(values) % block_size)).reshape(-1, block_size)
    last = len(values) - (len(padded) - 1) * block_size
    wanted = _wanted(padded, last, code)
    top, absmax = MAGNITUDES[code][-1], code != "bins2"
    rounding = {"fp16": _to_fp16, "bf16": _to_bf16, "fp32": _to_fp32, "e4m4": _to_e4m4}[scale]
    scales, bases_and_scales = rounding(np.minimum(wanted, _largest(scale, top)), absmax, _GROUP // block_size)
    divisor = np.where(scales == 0, np.float32(1), scales)[:, None]
    index = _nearest(np.abs(padded) / divisor, code)
    index[scales == 0] = 0
    negative = np.signbit(padded) & (scales != 0)[:, None]
    magnitude = np.array(MAGNITUDES[code], dtype=np.float32)[index] * scales[:, None]
    decoded = np.where(negative, -magnitude, magnitude).astype(np.float32)
    return Encoded(_pack(index, negative, code) + bases_and_scales, scales, decoded.reshape(-1)[: len(values)])


def _wanted(padded: Floats, last: int, code: str) -> Floats:
    largest = np.abs(padded).max(axis=1)
    if code != "bins2":
        return (largest / np.float32(MAGNITUDES[code][-1])).astype(np.float32)
    ratio = np.abs(padded) / np.where(largest == 0, np.float32(1), largest)[:, None]
    steps = np.rint(ratio * np.float32(2047)).astype(np.int64)
    count = np.full(len(padded), padded.shape[1], dtype=np.float32)
    count[-1] = last
    mean = (steps * steps).sum(axis=1).astype(np.float32) / count
    return np.sqrt(mean, dtype=np.float32) * np.float32(0.4528 / 2047) * largest


def _nearest(ratio: Floats, code: str) -> npt.NDArray[np.int64]:
    """The index of the magnitude that is nearest, of two the even one."""
    levels = np.array(MAGNITUDES[code])
    distance = np.abs(np.minimum(ratio.astype(np.float64), levels[-1])[..., None] - levels)
    best = distance.min(axis=-1, keepdims=True)
    candidates = np.where(distance == best, np.arange(len(levels)), -1)
    highest, lowest = candidates.max(axis=-1), np.where(candidates < 0, len(levels), candidates).min(axis=-1)
    return np.where(highest % 2 == 0, highest, lowest)


def _pack(index: npt.NDArray[np.int64], negative: npt.NDArray[np.bool_], code: str) -> bytes:
    bits = BITS[code]
    integer = code.startswith("int")
    fields = [
        (-int(i) if n else int(i)) % 2**bits if integer else int(i) + (int(n) << (bits - 1))
        for i, n in zip(index.reshape(-1), negative.reshape(-1), strict=True)
    ]
    each = 8 // bits
    return bytes(
        sum(field << (bits * place) for place, field in enumerate(fields[start : start + each]))
        for start in range(0, len(fields), each)
    )


def _largest(scale: str, top: float) -> np.float32:
    """The largest scale that its dtype holds and whose product with the top magnitude is finite."""
    if scale == "fp16":
        return np.float32(65504)
    kept = {"fp32": 0, "bf16": 16, "e4m4": 19}[scale]
    bits = int(np.float32(FLOAT32_MAX / top).view(np.uint32)) >> kept << kept
    while top * float(_float(bits)) > FLOAT32_MAX:
        bits -= 1 << kept
    return _float(bits)


def _float(bits: int) -> np.float32:
    return np.array([bits], dtype=np.uint32).view(np.float32)[0]


def _to_fp16(wanted: Floats, up: bool, per_group: int) -> tuple[Floats, bytes]:
    near = wanted.astype(np.float16)
    with np.errstate(over="ignore"):  # the largest has no next one, and needs none
        next_up = np.nextafter(near, np.float16(np.inf))
    scales = np.where(up & (near.astype(np.float32) < wanted), next_up, near)
    return scales.astype(np.float32), scales.astype("<f2").tobytes()


def _to_bf16(wanted: Floats, up: bool, per_group: int) -> tuple[Floats, bytes]:
    bits = wanted.view(np.uint32).astype(np.uint64)
    tops = ((bits + (0xFFFF if up else 0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint32)
    return (tops << 16).astype(np.uint32).view(np.float32), tops.astype("<u2").tobytes()


def _to_fp32(wanted: Floats, up: bool, per_group: int) -> tuple[Floats, bytes]:
    return wanted, wanted.astype("<f4").tobytes()


def _to_e4m4(wanted: Floats, up: bool, per_group: int) -> tuple[Floats, bytes]:
    tops = [(int(bits) + (0x7FFFF if up else 0x40000)) >> 19 for bits in wanted.view(np.uint32)]
    bases, codes, scales = [], [], []
    for start in range(0, len(tops), per_group):
        group = tops[start : start + per_group]
        bases.append(max(group) - 255)
        for top, value in zip(group, wanted[start:], strict=False):
            code = 0 if value == 0 else max(top - bases[-1], 1 if up else 0)
            codes.append(code)
            scales.append(_float((bases[-1] + code) << 19) if code else np.float32(0))
    return np.array(scales, dtype=np.float32), np.array(bases, dtype="<i2").tobytes() + bytes(codes)


def philox(key: int, round: int, position: int) -> int:
    """The 32-bit word of a position, after Salmon et al. 2011, in plain integers."""
    word, block_number = position % 4, position // 4
    counter = [block_number % 2**32, block_number >> 32, round, 0]
    keys = [key % 2**32, key >> 32]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ keys[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ keys[1],
            first % 2**32,
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return counter[word]


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
