"""A corpus as one rank sees it: its share of the training documents as a stream, and the held-out text."""

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from dilocox.config import DataConfig
from dilocox.data.dealing import Deal, document_hash
from dilocox.data.sources import Document, open_source
from dilocox.data.stream import Packed, Packer, Stream
from dilocox.data.tokenizer import Tokenizer, build_tokenizer
from dilocox.errors import DataError


@dataclass(frozen=True)
class Heldout:
    """The held-out text, from which every data parallel rank takes its own sequences. No island trains on it."""

    packed: Packed
    sequence_length: int
    micro_batch_size: int
    dp: int
    dp_rank: int

    @property
    def sequences(self) -> int:
        """Sequences of all dp ranks together."""
        return max(0, len(self.packed.tokens) - 1) // self.sequence_length

    def microbatches(self, batches: int) -> list[Tensor]:
        """int64 [micro_batch, sequence_length + 1] each, of this dp rank: spread evenly over the text, none twice.

        The same on every island and every call; fewer than `batches` when there is no more text, on all dp ranks alike.
        """
        length = self.sequence_length
        batches = min(batches, self.sequences // (self.micro_batch_size * self.dp))
        total = batches * self.micro_batch_size * self.dp
        picked = [index * self.sequences // total for index in range(self.dp_rank, total, self.dp)]
        tokens = [self.packed.tokens[index * length : (index + 1) * length + 1] for index in picked]
        shape = (batches, self.micro_batch_size, length + 1)
        return list(torch.from_numpy(np.array(tokens, dtype=np.int64).reshape(shape)))


@dataclass(frozen=True)
class Corpus:
    """What one data parallel rank of one island trains and is measured on.

    `fingerprint` stands for every document (id and text), the tokenizer and the split; it is equal on all islands
    that may train together, wherever their copies of the corpus lie. `documents` and `tokens` count this rank's share.
    """

    train: Stream
    tokenizer: Tokenizer
    fingerprint: str
    documents: int
    tokens: int
    all_documents: int
    all_bytes: int
    skipped: Counter[str]
    heldout_text: Heldout

    def heldout(self, batches: int) -> list[Tensor]:
        """Held-out microbatches of this dp rank; see `Heldout.microbatches`."""
        return self.heldout_text.microbatches(batches)

    def summary(self) -> dict[str, object]:
        """What a run records about its data; JSON-able. Counts are of the whole corpus but for the rank's share."""
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.name,
            "documents": self.all_documents,
            "bytes": self.all_bytes,
            "skipped": dict(self.skipped),
            "heldout_documents": self.heldout_text.packed.documents,
            "heldout_tokens": len(self.heldout_text.packed.tokens),
            "rank_documents": self.documents,
            "rank_tokens": self.tokens,
        }


def open_corpus(
    data: DataConfig,
    *,
    islands: int,
    island: int,
    dp: int,
    dp_rank: int,
    seed: int,
    sequence_length: int,
    micro_batch_size: int,
    batch_size: int,
) -> Corpus:
    """Read a corpus once and keep what this rank trains on and what is held out, tokenised, in memory.

    Every rank reads all text (to fingerprint it) and keeps 2 bytes a token of its own share and of the held-out
    shards: right for corpora of some gigabytes. Larger ones want a tokenised format that is mapped, not read.
    Raises ConfigError and DataError for whatever cannot be read, and when a share is smaller than what a rank
    consumes in one inner step, or the held-out text smaller than one microbatch of each dp rank.
    """
    tokenizer = build_tokenizer(data.tokenizer)
    deal = Deal(data.virtual_shards, data.heldout_fraction, islands, dp)
    share, heldout_shards = deal.training(island, dp_rank), deal.heldout()
    train, heldout = Packer(tokenizer), Packer(tokenizer)
    fingerprint = _Fingerprint(f"{tokenizer.name} {deal.heldout_shards} of {deal.virtual_shards}")
    source = open_source(data)
    for document in source.documents():
        fingerprint.add(document)
        key = document_hash(document.id)
        if deal.shard(key) in share:
            train.add(key, document.text)
        elif deal.shard(key) in heldout_shards:
            heldout.add(key, document.text)
    packed = train.pack()
    heldout_text = Heldout(heldout.pack(), sequence_length, micro_batch_size, dp, dp_rank)
    where = f"data={data.source.value} (data.path={data.path!r})"
    _check_share(packed, batch_size // dp, sequence_length, f"{where}, island {island}, dp rank {dp_rank}")
    _check_heldout(heldout_text, data, where)
    return Corpus(
        train=Stream(packed, seed=seed, sequence_length=sequence_length, micro_batch_size=micro_batch_size),
        tokenizer=tokenizer,
        fingerprint=fingerprint.value(),
        documents=packed.documents,
        tokens=len(packed.tokens),
        all_documents=fingerprint.documents,
        all_bytes=fingerprint.bytes,
        skipped=source.skipped,
        heldout_text=heldout_text,
    )


class _Fingerprint:
    """BLAKE2b over documents in the source's order, which is sorted; lengths keep neighbours apart."""

    def __init__(self, settings: str) -> None:
        self.documents = 0
        self.bytes = 0
        self._hash = blake2b(settings.encode(), digest_size=16)

    def add(self, document: Document) -> None:
        name, text = document.id.encode(errors="surrogateescape"), document.text.encode()
        self._hash.update(f"\0{len(name)} {len(text)}\0".encode())
        self._hash.update(name)
        self._hash.update(text)
        self.documents += 1
        self.bytes += len(text)

    def value(self) -> str:
        return self._hash.hexdigest()


def _check_share(packed: Packed, sequences: int, sequence_length: int, whose: str) -> None:
    needed = sequences * sequence_length + 1
    if len(packed.tokens) < needed:
        raise DataError(
            f"{whose}: its share of {packed.documents} documents holds {len(packed.tokens)} tokens, fewer than the "
            f"{needed} of one batch ({sequences} sequences of {sequence_length}). Add documents (many short ones deal "
            "better than a few long ones), use fewer islands, or lower island.batch_size or model.sequence_length"
        )


def _check_heldout(heldout: Heldout, data: DataConfig, where: str) -> None:
    needed = heldout.micro_batch_size * heldout.dp
    if heldout.sequences < needed:
        raise DataError(
            f"{where}: data.heldout_fraction={data.heldout_fraction} holds out {heldout.packed.documents} documents "
            f"with {heldout.sequences} sequences, fewer than the {needed} of one microbatch on each of {heldout.dp} "
            "dp ranks. Raise data.heldout_fraction, add documents, or lower island.micro_batch_size"
        )
