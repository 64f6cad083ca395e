"""Packed documents, and the endless stream of training microbatches that is read from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.data.tokenizer import Tokenizer, Tokens
from dilocox.errors import CheckpointError


@dataclass(frozen=True)
class Packed:
    """Tokenised documents one after another, each followed by the end-of-document token.

    tokens: uint16 [tokens]; starts: int64 [documents + 1], where each document begins and the last one ends;
    hashes: uint64 [documents], the documents' hashes, which decide their order in an epoch.
    """

    tokens: Tokens
    starts: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]

    @property
    def documents(self) -> int:
        return len(self.hashes)


class Packer:
    """Collects documents and packs them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = np.array([tokenizer.end_of_document], dtype=np.uint16)
        self._parts: list[Tokens] = []
        self._hashes: list[int] = []

    def add(self, document_hash: int, text: str) -> None:
        self._parts.append(np.concatenate([self._tokenizer.encode(text), self._end]))
        self._hashes.append(document_hash)

    def pack(self) -> Packed:
        tokens = np.concatenate([*self._parts, self._end[:0]])
        starts = np.cumsum([0, *map(len, self._parts)], dtype=np.int64)
        return Packed(tokens, starts, np.array(self._hashes, dtype=np.uint64))


class Epoch:
    """One pass over packed documents: all sequences of sequence_length + 1 tokens, in a random order.

    The documents are shuffled, joined end to start, and the ring is cut into sequences; each begins with the last token
    of the one before, so that every token is a target once. Only the last sequence, which would be shorter, goes on
    from the ring's start. Then the sequences are shuffled, so that a batch mixes documents. Both orders depend on the
    seed, the epoch's number and, for documents, their hashes alone: not on a library's random numbers.
    """

    def __init__(self, packed: Packed, *, seed: int, number: int, sequence_length: int) -> None:
        self.number = number
        self._packed = packed
        self._sequence_length = sequence_length
        self._documents = _shuffled(packed.hashes, f"documents/{seed}/{number}")
        self._ends = np.cumsum(np.diff(packed.starts)[self._documents])
        sequences = -(-len(packed.tokens) // sequence_length)
        self._sequences = _shuffled(np.arange(sequences, dtype=np.uint64), f"sequences/{seed}/{number}")

    def __len__(self) -> int:
        return len(self._sequences)

    def read(self, index: int, target: npt.NDArray[np.int64]) -> None:
        """Write the index-th sequence into `target`, int64 [sequence_length + 1]."""
        token = int(self._sequences[index]) * self._sequence_length
        filled = 0
        while filled < len(target):
            place = int(np.searchsorted(self._ends, token, side="right"))
            stop = int(self._packed.starts[self._documents[place] + 1])
            start = stop - (int(self._ends[place]) - token)
            count = min(stop - start, len(target) - filled)
            target[filled : filled + count] = self._packed.tokens[start : start + count]
            filled += count
            token = (token + count) % len(self._packed.tokens)


class Stream:
    """An endless stream of training sequences over packed documents, epoch after epoch, each shuffled anew."""

    def __init__(self, packed: Packed, *, seed: int, sequence_length: int, micro_batch_size: int) -> None:
        if not packed.documents:
            raise ValueError("a stream needs at least one document")
        self._packed = packed
        self._seed = seed
        self._shape = (micro_batch_size, sequence_length + 1)
        self._epoch, self._sequence = self._open(0), 0

    def next_microbatch(self) -> Tensor:
        """int64 [micro_batch, sequence_length + 1]; it may reach into the next epoch."""
        microbatch = np.empty(self._shape, dtype=np.int64)
        for row in microbatch:
            self._epoch.read(self._sequence, row)
            self._sequence += 1
            if self._sequence == len(self._epoch):
                self._epoch, self._sequence = self._open(self._epoch.number + 1), 0
        return torch.from_numpy(microbatch)

    def position(self) -> dict[str, int]:
        """Where the next microbatch begins, for `seek`: the epoch, and how many of its sequences were read."""
        return {"epoch": self._epoch.number, "sequence": self._sequence}

    def seek(self, position: Mapping[str, int]) -> None:
        """Go on from a position of a stream over the same documents with the same seed, bit for bit.

        Raises CheckpointError when there is no such position in this stream.
        """
        number, sequence = position["epoch"], position["sequence"]
        if number < 0 or not 0 <= sequence < len(self._epoch):
            raise CheckpointError(
                f"data position epoch={number}, sequence={sequence} is outside an epoch of {len(self._epoch)} "
                "sequences: the checkpoint belongs to other data, or to another number of islands or dp ranks"
            )
        self._epoch, self._sequence = self._open(number), sequence

    def _open(self, number: int) -> Epoch:
        return Epoch(self._packed, seed=self._seed, number=number, sequence_length=self._shape[1] - 1)


def _shuffled(identities: npt.NDArray[np.uint64], salt: str) -> npt.NDArray[np.intp]:
    """The indices of `identities`, sorted by a hash of identity and salt."""
    key = np.uint64(int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little"))
    return np.argsort(_mix(_mix(identities) ^ key), kind="stable")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection in which every bit moves every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
