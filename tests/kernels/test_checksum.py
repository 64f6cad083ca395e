"""The checksum against its formula in Python integers, and what it must notice."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_kernels.checksum import checksum64

WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)
STARTS = st.one_of(st.integers(0, 100), st.integers(2**31 - 70, 2**31 + 10), st.integers(2**40, 2**41))


def formula(words: list[int], start: int) -> int:
    return sum(word * ((2 * (start + i) + 1) % 2**32) for i, word in enumerate(words)) % 2**64


def as_bytes(words: list[int]) -> torch.Tensor:
    return torch.tensor(list(struct.pack(f"<{len(words)}I", *words)), dtype=torch.uint8)


@given(WORDS, STARTS)
def test_floats_and_bytes_follow_the_formula(words: list[int], start: int) -> None:
    raw = as_bytes(words)
    assert checksum64(raw, start) == formula(words, start)
    assert checksum64(raw.view(torch.float32), start) == formula(words, start)


@given(st.binary(max_size=50), st.integers(0, 9))
def test_bytes_are_filled_up_with_zeros_wherever_they_lie(data: bytes, offset: int) -> None:
    padded = data + bytes(-len(data) % 4)
    words = list(struct.unpack(f"<{len(padded) // 4}I", padded))
    lying = torch.tensor([255] * offset + list(data), dtype=torch.uint8)[offset:]
    assert checksum64(lying) == formula(words, 0)


def test_many_chunks_follow_the_formula_and_one_thread_equals_two() -> None:
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    words = list(struct.unpack("<200003I", struct.pack("<200003f", *values.tolist())))
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        assert checksum64(values, 2**31 - 100_000) == formula(words, 2**31 - 100_000)
    torch.set_num_threads(before)


@given(st.integers(0, 1000), STARTS)
def test_ranges_add_up(cut: int, start: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    parts = checksum64(values[:cut], start) + checksum64(values[cut:], start + cut)
    assert parts % 2**64 == checksum64(values, start)


@given(WORDS, st.data())
def test_a_changed_bit_and_swapped_words_are_noticed(words: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words) - 1))
    flipped = [*words]
    flipped[place] ^= 1 << data.draw(st.integers(0, 31))
    assert checksum64(as_bytes(flipped)) != checksum64(as_bytes(words))
    other = data.draw(st.integers(0, len(words) - 1))
    swapped = [*words]
    swapped[place], swapped[other] = swapped[other], swapped[place]
    assert (checksum64(as_bytes(swapped)) == checksum64(as_bytes(words))) == (swapped == words)


def test_minus_zero_is_not_zero() -> None:
    assert checksum64(torch.tensor([-0.0])) != checksum64(torch.tensor([0.0])) == 0


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(4, dtype=torch.bfloat16)],
    ids=["2d", "strided", "bf16"],
)
def test_other_tensors_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1-D contiguous float32 or uint8"):
        checksum64(wrong)
