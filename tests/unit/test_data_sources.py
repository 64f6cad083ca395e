"""Sources: what counts as a document, and every kind of bad input named with file, line and remedy."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pytest
import zstandard

from dilocox.config import DataConfig, Source, Tokenizer
from dilocox.data.sources import Document, list_files, open_source
from dilocox.errors import ConfigError, DataError, DilocoxError


def _config(source: Source, path: Path | str | None, pattern: str = "**/*") -> DataConfig:
    path = None if path is None else str(path)
    return DataConfig(source, path, pattern, "text", Tokenizer.bytes, heldout_fraction=0.1, virtual_shards=16)


def _read(source: Source, path: Path | str | None, pattern: str = "**/*") -> list[Document]:
    return list(open_source(_config(source, path, pattern)).documents())


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _line(text: object) -> bytes:
    return json.dumps({"id": 1, "text": text}).encode() + b"\n"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*", ["a.py", "b.txt", "deep/c.py", "deep/er/d.py"]),
        ("*", ["a.py", "b.txt"]),
        ("**/*.py", ["a.py", "deep/c.py", "deep/er/d.py"]),
        ("deep/*.py", ["deep/c.py"]),
        ("deep/**", ["deep/c.py", "deep/er/d.py"]),
        ("**/[ab].*", ["a.py", "b.txt"]),
    ],
)
def test_patterns_choose_files(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    names = ["deep/er/d.py", "b.txt", "deep/c.py", "a.py", ".hidden", ".git/e.py", "deep/out.bak/f.py"]
    _write(tmp_path, dict.fromkeys(names, b"x"))
    assert list_files(tmp_path, pattern, ("*.bak",)) == expected


def test_a_folder_gives_its_files_as_they_are(tmp_path: Path) -> None:
    _write(tmp_path, {"b/two.txt": b"line\r\nline\n", "one.txt": "é\n".encode()})
    os.symlink(tmp_path / "one.txt", tmp_path / "three.txt")
    assert _read(Source.folder, tmp_path) == [
        Document("b/two.txt", "line\r\nline\n"),
        Document("one.txt", "é\n"),
        Document("three.txt", "é\n"),
    ]


def test_files_without_text_are_refused_with_their_number_and_the_first_name(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": b"fine", "b.bin": b"\x00\x01", "c.txt": b"", "d.bin": b"a\0b", "e.txt": b"\xff\xfe"})
    with pytest.raises(DataError) as caught:
        _read(Source.folder, tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / 'b.bin'} is binary" in message
    assert "Of 5 files" in message
    assert "2 binary, 1 empty, 1 not UTF-8" in message
    assert "data.pattern (now '**/*'" in message


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        (Source.folder, "missing", r"data\.path='.*missing': no such file or folder"),
        (Source.jsonl, "missing.jsonl", r"data\.path='.*missing\.jsonl': no such file or folder"),
        (Source.folder, "file.txt", r"data\.path='.*file\.txt': is a file.*data\.pattern"),
        (Source.folder, "bare", r"data\.pattern='\*\*/\*' matches no file in .*bare.*data\.path"),
        (Source.jsonl, "bare", r"data\.pattern='\*\*/\*' matches no file in .*bare"),
        (Source.folder, "linked", r"linked/link cannot be read: Is a directory"),
        (Source.folder, "dangling", r"dangling/link cannot be read: No such file"),
        (Source.jsonl, "file.txt", r"file\.txt: expected \.jsonl, \.jsonl\.gz or \.jsonl\.zst"),
    ],
)
def test_paths_that_cannot_be_read_are_named(tmp_path: Path, source: Source, path: str, message: str) -> None:
    _write(tmp_path, {"file.txt": b"text"})
    for folder in ("bare", "linked", "dangling"):
        (tmp_path / folder).mkdir()
    (tmp_path / "linked/link").symlink_to(tmp_path / "bare")
    (tmp_path / "dangling/link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DilocoxError, match=message):
        _read(source, tmp_path / path)


@pytest.mark.parametrize("source", [Source.folder, Source.jsonl])
def test_a_source_that_needs_a_path_says_so(source: Source) -> None:
    with pytest.raises(ConfigError, match=r"data\.path=None"):
        open_source(_config(source, None))


def test_the_standard_library_takes_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path=.*data=folder"):
        open_source(_config(Source.stdlib, tmp_path))


def test_the_standard_library_is_its_own_source_alone() -> None:
    source = open_source(_config(Source.stdlib, None, "**/*.py"))
    documents = {document.id: document.text for document in source.documents()}
    decoder = Path(sysconfig.get_paths()["stdlib"]) / "json/decoder.py"
    assert documents["json/decoder.py"] == decoder.read_bytes().decode()
    assert not any("-packages/" in name or "__pycache__" in name or "_sysconfigdata" in name for name in documents)
    assert len(documents) > 500
    assert set(source.skipped) <= {"empty", "binary", "not UTF-8"}


def _compressed(kind: str, content: bytes) -> bytes:
    half = len(content) // 2
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}
    if kind == "":
        return content
    return compress[kind](content[:half]) + compress[kind](content[half:])  # two members, as `cat a.gz b.gz` gives


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
def test_json_lines_give_a_document_a_line(tmp_path: Path, kind: str) -> None:
    content = _line("one\u2028still one") + b"\n" + _line("") + _line("thr\u00e9e").rstrip()
    name = "part.jsonl" + (f".{kind}" if kind else "")
    _write(tmp_path, {name: _compressed(kind, content)})
    source = open_source(_config(Source.jsonl, tmp_path / name))
    expected = [Document(f"{name}#1", "one\u2028still one"), Document(f"{name}#4", "thrée")]
    assert list(source.documents()) == expected
    assert source.skipped == {"blank line": 1, "empty text": 1}
    assert _read(Source.jsonl, tmp_path) == expected


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_long_lines_survive_compression(tmp_path: Path, kind: str) -> None:
    texts = [os.urandom(700_000).hex(), "short", os.urandom(400_000).hex()]
    _write(tmp_path, {f"part.jsonl.{kind}": _compressed(kind, b"".join(map(_line, texts)))})
    assert [document.text for document in _read(Source.jsonl, tmp_path)] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "unfinished\n', r"not JSON .*Mend or remove the line"),
        (b'{"text": "a"} {"text": "b"}\n', r"not JSON"),
        pytest.param(b"[" * 100_000 + b"\n", r"not JSON", id="nested too deeply"),
        (b'["text"]\n', r"a JSON list where an object was expected"),
        (b"7\n", r"a JSON int where an object was expected"),
        (b'{"body": "x", "id": 3}\n', r"no field 'text' \(its fields: 'body', 'id'\)\. Set data\.text_field"),
        (b'{"text": 12}\n', r"field 'text' is 12 where a string was expected"),
        (b'{"text": null}\n', r"field 'text' is None where a string was expected"),
        (b'{"text": "\xff"}\n', r"not UTF-8 \(byte 11\)"),
        (rb'{"text": "\ud800"}' + b"\n", r".* half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    _write(tmp_path, {"a/part.jsonl": _line("fine"), "b/part.jsonl": _line("fine") + b"\n" + line})
    with pytest.raises(DataError, match=rf"b/part\.jsonl, line 3: {message}"):
        _read(Source.jsonl, tmp_path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_and_truncated_files_are_named(tmp_path: Path, kind: str) -> None:
    whole = _compressed(kind, b"".join(_line(os.urandom(200).hex()) for _ in range(200)))
    inside = len(whole) // 4  # of the first member: cut between the two, the file would be whole
    for content in (whole[:-5], whole[:inside], whole + b"rubbish", b"no archive at all"):
        _write(tmp_path, {f"part.jsonl.{kind}": content})
        with pytest.raises(DataError, match=rf"part\.jsonl\.{kind}, after line \d+: cannot be read \(.+\)"):
            _read(Source.jsonl, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n\n", _line("")])
def test_a_json_lines_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    _write(tmp_path, {"part.jsonl": content})
    with pytest.raises(DataError, match=r"part\.jsonl holds no text at all.*data\.pattern"):
        _read(Source.jsonl, tmp_path)
