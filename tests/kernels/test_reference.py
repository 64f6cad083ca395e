"""What holds for every format: error feedback, norms, cuts and threads change no bit, NaN is never encoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels import reference
from dilocox_kernels.formats import BlockFormat, CastFormat, Format
from dilocox_kernels.norms import Norms
from tests.kernels import oracle

FORMATS: list[Format] = [
    CastFormat("fp32"),
    CastFormat("bf16"),
    BlockFormat(4, 64, "fp16"),
    BlockFormat(8, 32, "bf16"),
    BlockFormat(4, 256, "fp32"),
]
SEVERAL_CHUNKS = 3 * reference.CPU_CHUNK_ELEMENTS + 4321
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def encode(fmt: Format, delta: Tensor, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor, Norms]:
    body, kept = torch.empty(fmt.encoded_bytes(delta.numel()), dtype=torch.uint8), torch.empty_like(delta)
    return body, kept, reference.encode(fmt, delta, residual, decay, body, kept)


def decode(fmt: Format, body: Tensor, numel: int) -> Tensor:
    out = torch.empty(numel)
    reference.decode(fmt, body, out)
    return out


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@formats
@given(oracle.ranges(), oracle.ranges(), st.sampled_from([0.0, 0.9, 1.0]))
def test_residual_is_what_was_to_be_sent_minus_what_was(
    fmt: Format, delta: oracle.Floats, owed: oracle.Floats, decay: float
) -> None:
    quarter = np.float32(0.25)  # so that the sum stays finite
    delta, owed = delta[: len(owed)] * quarter, owed[: len(delta)] * quarter
    before = delta.copy(), owed.copy()
    body, kept, _ = encode(fmt, torch.from_numpy(delta), torch.from_numpy(owed), decay)
    to_send = delta + np.float32(decay) * owed
    assert np.array_equal(kept.numpy(), to_send - decode(fmt, body, len(delta)).numpy())
    assert np.array_equal(delta, before[0])
    assert np.array_equal(owed, before[1])
    again = encode(fmt, torch.from_numpy(to_send), None, 1.0)
    assert torch.equal(again[0], body)


@formats
@given(data=st.data())
def test_cuts_at_multiples_of_the_alignment_change_no_code(fmt: Format, data: st.DataObject) -> None:
    numel = 1000
    delta, owed = noise(numel, 1), noise(numel, 2)
    body, kept, _ = encode(fmt, delta, owed, 0.9)
    whole = decode(fmt, body, numel)
    inner = data.draw(st.lists(st.integers(0, numel // fmt.alignment), max_size=5))
    for start, stop in pairwise(sorted({0, numel, *(cut * fmt.alignment for cut in inner)})):
        part, part_kept, _ = encode(fmt, delta[start:stop], owed[start:stop], 0.9)
        assert torch.equal(decode(fmt, part, stop - start), whole[start:stop])
        assert torch.equal(part_kept, kept[start:stop])
        if isinstance(fmt, BlockFormat):
            blocks = slice(start // fmt.block_size, fmt.blocks(stop))
            for mine, all_of_it in zip(fmt.split(part, stop - start), fmt.split(body, numel), strict=True):
                assert torch.equal(mine, all_of_it[blocks])


@formats
def test_many_chunks_equal_numpy_and_one_thread_equals_two(fmt: Format) -> None:
    delta, owed = noise(SEVERAL_CHUNKS, 1), noise(SEVERAL_CHUNKS, 2)
    results = []
    for count in (1, 2):
        with threads(count):
            body, kept, norms = encode(fmt, delta, owed, 0.9)
            merged = torch.ones(SEVERAL_CHUNKS)
            reference.decode_accumulate(fmt, body, 1 / 3, merged)
            results.append((body, kept, merged, norms))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))
    assert results[0][3] == results[1][3]
    if isinstance(fmt, BlockFormat):
        to_send = delta.numpy() + np.float32(0.9) * owed.numpy()
        expected = oracle.block(to_send, fmt.bits, fmt.block_size, fmt.scale_dtype_name)
        assert results[0][0].numpy().tobytes() == expected.body


@formats
def test_the_chunks_of_a_gpu_change_no_bit(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    delta, owed = noise(SEVERAL_CHUNKS, 1), noise(SEVERAL_CHUNKS, 2)
    results = []
    for chunk in (reference.CPU_CHUNK_ELEMENTS, reference.DEVICE_CHUNK_ELEMENTS):
        monkeypatch.setattr(reference, "CPU_CHUNK_ELEMENTS", chunk)
        body, kept, norms = encode(fmt, delta, owed, 0.9)
        results.append((body, kept, decode(fmt, body, SEVERAL_CHUNKS), norms))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))
    assert results[0][3] == results[1][3]


@formats
def test_accumulate_rounds_product_and_sum_once(fmt: Format) -> None:
    numel = 5000
    body, _, _ = encode(fmt, noise(numel, 1), None, 1.0)
    out = noise(numel, 2)
    expected = out.numpy() + np.float32(0.7) * decode(fmt, body, numel).numpy()
    reference.decode_accumulate(fmt, body, 0.7, out)
    assert np.array_equal(out.numpy(), expected)


@formats
def test_the_sum_of_squares_is_of_delta_and_the_largest_of_what_is_sent(fmt: Format) -> None:
    delta, owed = noise(SEVERAL_CHUNKS, 3), noise(SEVERAL_CHUNKS, 4)
    _, _, norms = encode(fmt, delta, owed, 0.5)
    to_send = delta + 0.5 * owed
    assert norms.sum_of_squares == pytest.approx(delta.double().square().sum().item(), rel=1e-12)
    assert norms.max_abs == to_send.abs().max().item()
    assert norms.finite
    huge = encode(fmt, torch.full((70,), 1e38), None, 1.0)[2]
    assert huge.sum_of_squares == pytest.approx(70e76, rel=1e-6)  # beyond fp32


@formats
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, SEVERAL_CHUNKS - 1])
def test_nan_and_infinity_are_reported_and_never_encoded(fmt: Format, bad: float, position: int) -> None:
    for where in (0, 1):
        delta, owed = noise(SEVERAL_CHUNKS, 1), noise(SEVERAL_CHUNKS, 2)
        (delta, owed)[where][position] = bad
        body, kept, norms = encode(fmt, delta, owed, 1.0)
        assert not norms.finite
        assert not body.any()
        assert not kept.any()


@formats
def test_a_sum_beyond_fp32_is_not_finite(fmt: Format) -> None:
    assert not encode(fmt, torch.full((3,), 3e38), torch.full((3,), 3e38), 1.0)[2].finite


@formats
def test_an_empty_range_is_an_empty_body(fmt: Format) -> None:
    body, _, norms = encode(fmt, torch.empty(0), torch.empty(0), 1.0)
    assert body.numel() == 0
    assert norms == Norms(0.0, 0.0, True)
    assert decode(fmt, body, 0).numel() == 0


@formats
def test_a_body_of_another_size_is_refused(fmt: Format) -> None:
    body, _, _ = encode(fmt, noise(100, 1), None, 1.0)
    for damaged in (body[:-1], torch.cat([body, body[:1]])):
        with pytest.raises(ValueError, match=f"a body of {damaged.numel()} bytes"):
            reference.decode_accumulate(fmt, damaged, 1.0, torch.zeros(100))


@given(oracle.ranges())
def test_casts(values: oracle.Floats) -> None:
    exact, kept, _ = encode(CastFormat("fp32"), torch.from_numpy(values), None, 1.0)
    assert exact.numpy().tobytes() == values.astype("<f4").tobytes()
    assert not kept.any()
    halved, kept, _ = encode(CastFormat("bf16"), torch.from_numpy(values), None, 1.0)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    saturated = np.where(nearest_even & 0x7FFF == 0x7F80, nearest_even - 1, nearest_even).astype("<u2")
    assert halved.numpy().tobytes() == saturated.tobytes()
    assert np.array_equal(kept.double().numpy() + decode(CastFormat("bf16"), halved, len(values)).numpy(), values)


def test_an_unknown_cast_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='fp16'"):
        CastFormat("fp16")


def test_the_example_of_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    assert "assert norms.finite" in example
    exec(example, {})
