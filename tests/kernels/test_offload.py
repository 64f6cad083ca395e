"""Chunks that stream through host memory: everything arrives, everything goes back, two buffers are enough."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels.formats import BlockFormat
from dilocox_kernels.kernels import select
from dilocox_kernels.offload import HostStream
from dilocox_kernels.spans import Spans
from tests.kernels.cases import encode, noise

CPU = torch.device("cpu")
SIZES = st.lists(st.lists(st.integers(0, 60), max_size=4), max_size=6)


def tensors(sizes: list[list[int]]) -> list[list[Tensor]]:
    counter = iter(range(10**6))
    return [[torch.full((size,), float(next(counter))) for size in chunk] for chunk in sizes]


@given(SIZES)
def test_chunks_arrive_in_order_and_go_back_changed(sizes: list[list[int]]) -> None:
    chunks = tensors(sizes)
    before = [[tensor.clone() for tensor in chunk] for chunk in chunks]
    for place, chunk in zip(HostStream(CPU, 2048).run(chunks, fetch=True, give_back=True), before, strict=True):
        for local, original in zip(place, chunk, strict=True):
            assert torch.equal(local, original)
            local.add_(0.5)
    for chunk, originals in zip(chunks, before, strict=True):
        assert all(torch.equal(tensor, original + 0.5) for tensor, original in zip(chunk, originals, strict=True))


def test_without_giving_back_nothing_changes_and_memory_is_that_of_two_buffers() -> None:
    chunks = tensors([[16], [16], [16], [16]])
    addresses = set()
    for place in HostStream(CPU, 64).run(chunks, fetch=True, give_back=False):
        addresses.add(place[0].data_ptr())
        place[0].zero_()
    assert len(addresses) == 2
    assert all(bool((chunk[0] == number).all()) for number, chunk in enumerate(chunks))


def test_a_chunk_that_does_not_fit_is_refused_before_anything_is_copied() -> None:
    chunks = tensors([[16], [17]])
    with pytest.raises(ValueError, match="chunk 1 takes more than the 64 bytes"):
        next(HostStream(CPU, 64).run(chunks, fetch=True, give_back=True))


def test_encoding_through_the_stream_gives_the_same_bytes() -> None:
    fmt, kernels, spans = BlockFormat("int4", 64, "fp16"), select("cpu", "cpu"), Spans(192, ((0, 100), (128, 192)))
    chunks = [spans.cut(noise(192, seed)) for seed in range(5)]
    anchor = noise(192, 9)
    direct = [encode(kernels, fmt, chunk, spans, anchor=anchor)[0] for chunk in chunks]
    streamed = [
        encode(kernels, fmt, place, spans, anchor=anchor)[0]
        for place in HostStream(CPU, 4096).run(chunks, fetch=True, give_back=False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(direct, streamed, strict=True))
