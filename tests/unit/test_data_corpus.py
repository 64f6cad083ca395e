"""A corpus dealt to islands and dp ranks: disjoint, complete, held out, deterministic; whatever the source."""

import gzip
import json
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dilocox.config import DataConfig, Source, Tokenizer
from dilocox.data.corpus import Corpus, open_corpus
from dilocox.data.dealing import document_hash
from dilocox.data.sources import NOT_STDLIB, list_files
from dilocox.errors import ConfigError, DataError

VIRTUAL_SHARDS = 16
Texts = dict[str, str]


def _write_folder(folder: Path, texts: Texts) -> DataConfig:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return _config(Source.folder, folder)


def _write_lines(suffix: str, compress: Callable[[bytes], bytes]) -> Callable[[Path, Texts], DataConfig]:
    def write(folder: Path, texts: Texts) -> DataConfig:
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts.values()]
        for part in range(2):
            (folder / f"{part}.jsonl{suffix}").write_bytes(compress(b"".join(lines[part::2])))
        return _config(Source.jsonl, folder)

    return write


WRITERS = {
    "folder": _write_folder,
    "jsonl": _write_lines("", bytes),
    "jsonl.gz": _write_lines(".gz", gzip.compress),
    "jsonl.zst": _write_lines(".zst", zstandard.ZstdCompressor().compress),
}


def _config(source: Source, path: Path | None, heldout_fraction: float = 0.2) -> DataConfig:
    pattern = "**/*" if path else "**/*.py"
    path_text = str(path) if path else None
    return DataConfig(source, path_text, pattern, "text", Tokenizer.bytes, heldout_fraction, VIRTUAL_SHARDS)


def _open(
    data: DataConfig,
    *,
    islands: int = 1,
    island: int = 0,
    dp: int = 1,
    dp_rank: int = 0,
    seed: int = 1,
    sequence_length: int = 1,
    micro_batch_size: int = 1,
    batch_size: int | None = None,
) -> Corpus:
    return open_corpus(
        data,
        islands=islands,
        island=island,
        dp=dp,
        dp_rank=dp_rank,
        seed=seed,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        batch_size=micro_batch_size * dp if batch_size is None else batch_size,
    )


def _open_all(data: DataConfig, islands: int, dp: int) -> list[Corpus]:
    """Every dp rank of every island."""
    return [
        _open(data, islands=islands, island=island, dp=dp, dp_rank=dp_rank)
        for island in range(islands)
        for dp_rank in range(dp)
    ]


def _one_letter_texts(lengths: list[int]) -> Texts:
    """Documents that a token betrays: the n-th consists of one character of its own."""
    return {f"doc-{number}.txt": chr(number + 1) * length for number, length in enumerate(lengths)}


def _epoch(corpus: Corpus) -> Counter[int]:
    """How often each token is a target in one epoch, which at sequence length 1 has a sequence for each token."""
    epoch = corpus.train.position()["epoch"]
    targets = Counter(int(corpus.train.next_microbatch()[0, 1]) for _ in range(corpus.tokens))
    assert corpus.train.position() == {"epoch": epoch + 1, "sequence": 0}
    return targets


LENGTHS = st.lists(st.integers(1, 9), min_size=40, max_size=100)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.sampled_from(sorted(WRITERS)))
def test_every_document_is_trained_on_once_an_epoch_by_one_rank_or_held_out(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], islands: int, dp: int, kind: str
) -> None:
    texts = _one_letter_texts(lengths)
    data = WRITERS[kind](tmp_path_factory.mktemp("corpus"), texts)
    try:
        corpora = _open_all(data, islands, dp)
    except DataError:
        reject()  # so few documents that a rank has none
    shares = [_epoch(corpus) for corpus in corpora]
    end = corpora[0].tokenizer.end_of_document
    for corpus, share in zip(corpora, shares, strict=True):
        assert share.pop(end) == corpus.documents == len(share)
        assert share.total() + corpus.documents == corpus.tokens
        assert _epoch(corpus) - Counter({end: corpus.documents}) == share
    trained = sum(shares, Counter())
    assert sum(map(len, shares)) == len(trained)
    for number, text in enumerate(texts.values()):
        assert trained[number + 1] in (0, len(text))
    for corpus in corpora:
        assert corpus.documents >= 1
        assert corpus.all_documents == len(texts) == len(trained) + corpus.heldout_text.packed.documents
        assert set(corpus.heldout_text.packed.tokens.tolist()) == set(range(1, len(texts) + 1)) - set(trained) | {end}


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 30))
def test_added_documents_leave_the_others_where_they_are(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], keep: int
) -> None:
    texts = _one_letter_texts(lengths)
    fewer = dict(list(texts.items())[-keep - 10 :])
    try:
        before = _open_all(_write_folder(tmp_path_factory.mktemp("fewer"), fewer), 2, 1)
        after = _open_all(_write_folder(tmp_path_factory.mktemp("all"), texts), 2, 1)
    except DataError:
        reject()
    for old, new in zip(before, after, strict=True):
        assert set(_epoch(old)) <= set(_epoch(new))
        assert set(old.heldout_text.packed.tokens) <= set(new.heldout_text.packed.tokens)
    assert before[0].fingerprint != after[0].fingerprint or texts == fewer


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_another_number_of_islands_deals_whole_shards_anew(tmp_path: Path, kind: str) -> None:
    data = WRITERS[kind](tmp_path, _one_letter_texts([3] * 100))
    by_islands = {
        islands: [set(_epoch(corpus)) - {256} for corpus in _open_all(data, islands, 1)] for islands in (1, 5)
    }
    assert set.union(*by_islands[5]) == by_islands[1][0]
    if kind == "folder":
        shard_takers: dict[int, set[int]] = {}
        for taker, tokens in enumerate(by_islands[5]):
            for token in tokens:
                shard = document_hash(f"doc-{token - 1}.txt") % VIRTUAL_SHARDS
                shard_takers.setdefault(shard, set()).add(taker)
        assert all(len(takers) == 1 for takers in shard_takers.values())


def test_the_fingerprint_is_of_names_texts_and_split_alone(tmp_path: Path) -> None:
    texts = _one_letter_texts([4] * 60)
    folders = [tmp_path / name for name in ("a", "b", "changed", "renamed")]
    for folder in folders:
        folder.mkdir()
    first = _open(_write_folder(folders[0], texts), seed=1)
    same = _open(_write_folder(folders[1], dict(reversed(texts.items()))), islands=3, island=2, seed=2)
    assert first.fingerprint == same.fingerprint
    changed = _open(_write_folder(folders[2], texts | {"doc-3.txt": "other"}))
    *others, last = texts.items()
    renamed = _open(_write_folder(folders[3], dict(others) | {"new name": last[1]}))
    fraction = _open(_config(Source.folder, folders[0], heldout_fraction=0.3))
    assert len({corpus.fingerprint for corpus in (first, changed, renamed, fraction)}) == 4


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_held_out_microbatches_are_shared_out_among_dp_ranks(
    heldout_folder: Path, sequence_length: int, micro_batch_size: int, dp: int, batches: int
) -> None:
    def heldout(island: int, dp_rank: int) -> list[torch.Tensor]:
        corpus = _open(
            _config(Source.folder, heldout_folder),
            islands=2,
            island=island,
            dp=dp,
            dp_rank=dp_rank,
            sequence_length=sequence_length,
            micro_batch_size=micro_batch_size,
        )
        again = corpus.heldout(batches)
        corpus.train.next_microbatch()
        assert all(torch.equal(a, b) for a, b in zip(again, corpus.heldout(batches), strict=True))
        return again

    ranks = [heldout(0, dp_rank) for dp_rank in range(dp)]
    other_island = [heldout(1, dp_rank) for dp_rank in range(dp)]
    for mine, theirs in zip(ranks, other_island, strict=True):
        assert len(mine) == batches
        for batch, other in zip(mine, theirs, strict=True):
            assert batch.shape == (micro_batch_size, sequence_length + 1)
            assert batch.dtype == torch.int64
            assert torch.equal(batch, other)


@pytest.fixture(scope="module")
def heldout_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heldout")
    _write_folder(folder, _one_letter_texts([40] * 60))
    return folder


def test_no_held_out_sequence_is_taken_twice_and_none_is_missing(heldout_folder: Path) -> None:
    data = _config(Source.folder, heldout_folder)
    ranks = [_open(data, dp=2, dp_rank=dp_rank, sequence_length=7, micro_batch_size=3) for dp_rank in range(2)]
    batches = [batch for corpus in ranks for batch in corpus.heldout(10**6)]
    tokens = ranks[0].heldout_text.packed.tokens
    sequences = (len(tokens) - 1) // 7
    assert len(batches) == 2 * (sequences // 6)
    read = Counter(map(tuple, torch.cat(batches).tolist()))
    all_of_them = Counter(tuple(tokens[7 * i : 7 * i + 8].tolist()) for i in range(sequences))
    assert read <= all_of_them
    assert read.total() > sequences - 6


def test_a_few_held_out_sequences_are_spread_over_the_text(heldout_folder: Path) -> None:
    corpus = _open(_config(Source.folder, heldout_folder), sequence_length=8)
    documents = {int(batch[0, 0]) for batch in corpus.heldout(4)}
    assert len(documents) == 4


def test_the_standard_library_is_dealt_whole() -> None:
    data = DataConfig(Source.stdlib, None, "**/*.py", "text", Tokenizer.bytes, 0.02, 1024)
    corpora = [_open(data, islands=2, island=island, sequence_length=128, micro_batch_size=16) for island in range(2)]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    summary = corpora[0].summary()
    assert json.loads(json.dumps(summary)) == summary
    heldout_documents = corpora[0].heldout_text.packed.documents
    assert sum(corpus.documents for corpus in corpora) + heldout_documents == corpora[0].all_documents
    all_tokens = sum(corpus.tokens for corpus in corpora) + len(corpora[0].heldout_text.packed.tokens)
    assert all_tokens == corpora[0].all_bytes + corpora[0].all_documents
    assert min(corpus.tokens for corpus in corpora) > 0.4 * all_tokens


def test_held_out_tokens_decode_to_held_out_files() -> None:
    data = DataConfig(Source.stdlib, None, "**/*.py", "text", Tokenizer.bytes, 0.02, 1024)
    corpus = _open(data, sequence_length=64)
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in list_files(folder, data.pattern, NOT_STDLIB) if document_hash(name) % 1024 < 20]
    texts = [(folder / name).read_bytes().decode(errors="ignore") for name in names]
    for (sequence,) in corpus.heldout(50):
        ends = torch.nonzero(sequence == corpus.tokenizer.end_of_document).flatten() + 1
        for document in torch.tensor_split(sequence, ends):
            piece = corpus.tokenizer.decode(document).strip("\ufffd")  # a character cut by the sequence's edge
            assert any(piece in text for text in texts)


def test_a_share_smaller_than_a_batch_is_refused(tmp_path: Path) -> None:
    data = _write_folder(tmp_path, _one_letter_texts([4] * 60))
    tokens = _open(data, islands=2).tokens
    _open(data, islands=2, sequence_length=1, batch_size=tokens - 1)
    message = rf"island 0, dp rank 0: its share of \d+ documents holds {tokens} tokens, fewer than the {tokens + 1} of"
    with pytest.raises(DataError, match=message):
        _open(data, islands=2, sequence_length=1, batch_size=tokens)


def test_a_held_out_split_smaller_than_a_microbatch_is_refused(tmp_path: Path) -> None:
    data = _write_folder(tmp_path, _one_letter_texts([4] * 60))
    sequences = _open(data).heldout_text.sequences
    _open(data, micro_batch_size=sequences)
    with pytest.raises(
        DataError, match=rf"heldout_fraction=0\.2 .* {sequences} sequences, fewer than the {sequences + 1}"
    ):
        _open(data, micro_batch_size=sequences + 1)


def test_a_corpus_with_nothing_to_hold_out_is_refused(tmp_path: Path) -> None:
    name = next(f"{number}" for number in range(99) if document_hash(f"{number}") % VIRTUAL_SHARDS > 8)
    (tmp_path / name).write_text("all for training")
    with pytest.raises(DataError, match=r"holds out 0 documents .* Raise data\.heldout_fraction"):
        _open(_config(Source.folder, tmp_path))


def test_too_few_virtual_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.virtual_shards=16"):
        _open(_config(Source.folder, tmp_path), islands=14)
