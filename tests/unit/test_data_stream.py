"""The training stream: every token a target once an epoch, shuffled, and resumed bit for bit; and its tokenizer."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.data.dealing import document_hash
from dilocox.data.stream import Epoch, Packed, Packer, Stream
from dilocox.data.tokenizer import ByteTokenizer
from dilocox.errors import CheckpointError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=15)
SEQUENCE_LENGTH = st.integers(1, 20)
SEED = st.integers(0, 2**40)


def _packed(lengths: list[int]) -> Packed:
    """Documents in which every token differs from all others: the n-th token is n."""
    starts = np.cumsum([0, *lengths])
    hashes = np.array([document_hash(str(number)) for number in range(len(lengths))], dtype=np.uint64)
    return Packed(np.arange(starts[-1], dtype=np.uint16), starts, hashes)


def _sequences(packed: Packed, sequence_length: int, seed: int, number: int) -> np.ndarray:
    epoch = Epoch(packed, seed=seed, number=number, sequence_length=sequence_length)
    rows = np.empty((len(epoch), sequence_length + 1), dtype=np.int64)
    for index, row in enumerate(rows):
        epoch.read(index, row)
    return rows


@given(LENGTHS, SEQUENCE_LENGTH, SEED, st.integers(0, 5))
def test_an_epoch_reads_every_token_and_keeps_documents_whole(
    lengths: list[int], sequence_length: int, seed: int, number: int
) -> None:
    packed = _packed(lengths)
    rows = _sequences(packed, sequence_length, seed, number)
    total = sum(lengths)
    times_read = np.bincount(rows[:, 1:].ravel(), minlength=total)
    assert len(times_read) == total
    assert times_read.min() >= 1
    assert times_read.sum() - total == -total % sequence_length
    last_tokens, first_tokens = set(packed.starts[1:] - 1), set(packed.starts[:-1])
    for previous, token in zip(rows[:, :-1].ravel(), rows[:, 1:].ravel(), strict=True):
        assert token == previous + 1 or (previous in last_tokens and token in first_tokens)


@given(LENGTHS, SEQUENCE_LENGTH, SEED, st.integers(0, 5))
def test_sequences_overlap_by_one_token(lengths: list[int], sequence_length: int, seed: int, number: int) -> None:
    rows = _sequences(_packed(lengths), sequence_length, seed, number)
    ends = set(rows[:, -1])
    followed = [first for first in rows[:, 0] if first in ends]
    assert len(followed) >= len(rows) - 1  # all but the one at the ring's start


@given(LENGTHS, SEQUENCE_LENGTH, st.integers(1, 4), SEED, st.integers(0, 12), st.integers(1, 12))
def test_a_resumed_stream_equals_an_unbroken_one(
    lengths: list[int], sequence_length: int, micro_batch_size: int, seed: int, before: int, after: int
) -> None:
    def open_stream() -> Stream:
        packed = _packed(lengths)
        return Stream(packed, seed=seed, sequence_length=sequence_length, micro_batch_size=micro_batch_size)

    unbroken, resumed = open_stream(), open_stream()
    for _ in range(before):
        unbroken.next_microbatch()
    resumed.seek(json.loads(json.dumps(unbroken.position())))
    for _ in range(after):
        expected = unbroken.next_microbatch()
        assert expected.dtype == torch.int64
        assert expected.shape == (micro_batch_size, sequence_length + 1)
        assert torch.equal(resumed.next_microbatch(), expected)
    assert resumed.position() == unbroken.position()


@given(LENGTHS, SEQUENCE_LENGTH, st.integers(1, 4), SEED)
def test_a_stream_is_its_epochs_one_after_another(
    lengths: list[int], sequence_length: int, micro_batch_size: int, seed: int
) -> None:
    packed = _packed(lengths)
    stream = Stream(packed, seed=seed, sequence_length=sequence_length, micro_batch_size=micro_batch_size)
    epochs = np.concatenate([_sequences(packed, sequence_length, seed, number) for number in range(4)])
    microbatches = len(epochs) // micro_batch_size
    rows = torch.cat([stream.next_microbatch() for _ in range(microbatches)])
    assert torch.equal(rows, torch.from_numpy(epochs[: len(rows)]))
    read = len(rows)
    per_epoch = len(epochs) // 4
    assert stream.position() == {"epoch": read // per_epoch, "sequence": read % per_epoch}


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    packed = _packed([20] * 40)
    orders = {_sequences(packed, 8, seed, number).tobytes() for seed in range(3) for number in range(4)}
    assert len(orders) == 12
    assert np.array_equal(_sequences(packed, 8, 1, 2), _sequences(packed, 8, 1, 2))


def test_a_batch_mixes_documents() -> None:
    stream = Stream(_packed([100] * 50), seed=3, sequence_length=10, micro_batch_size=16)
    documents = stream.next_microbatch()[:, 0] // 100
    assert len(set(documents.tolist())) > 8


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run goes on in this order.
    assert _sequences(_packed([3, 2, 4, 1, 5]), 4, 1234, 0).tolist() == [
        [3, 4, 5, 6, 7],
        [12, 13, 14, 9, 0],
        [9, 0, 1, 2, 3],
        [7, 8, 10, 11, 12],
    ]


@pytest.mark.parametrize(
    "position", [{"epoch": 0, "sequence": 3}, {"epoch": 0, "sequence": -1}, {"epoch": -1, "sequence": 0}]
)
def test_a_position_of_other_data_is_refused(position: dict[str, int]) -> None:
    stream = Stream(_packed([3, 2, 4]), seed=1, sequence_length=3, micro_batch_size=1)
    with pytest.raises(CheckpointError, match="outside an epoch of 3 sequences"):
        stream.seek(position)


def test_an_end_of_document_follows_every_document() -> None:
    packer = Packer(ByteTokenizer())
    packer.add(7, "hé")
    packer.add(5, "x")
    packed = packer.pack()
    assert packed.tokens.tolist() == [ord("h"), 0xC3, 0xA9, 256, ord("x"), 256]
    assert packed.starts.tolist() == [0, 4, 6]
    assert packed.hashes.tolist() == [7, 5]
    assert packed.documents == 2


@given(st.lists(st.text(), max_size=5))
def test_bytes_decode_back_to_the_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    packer = Packer(tokenizer)
    for number, text in enumerate(texts):
        packer.add(number, text)
    packed = packer.pack()
    decoded = [
        tokenizer.decode(packed.tokens[start:stop])
        for start, stop in zip(packed.starts[:-1], packed.starts[1:], strict=True)
    ]
    assert decoded == texts
    assert (packed.tokens < tokenizer.vocab_size).all()


def test_a_cut_character_decodes_to_a_replacement() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("aé")[:-1]) == "a�"
