"""JSON lines: one object a line, in a plain file or one compressed with gzip or Zstandard."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from dilocox.errors import DataError

READ_BYTES = 1 << 20


def read_texts(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    """The number (from 1) and the text of each line; None for a blank line.

    Raises DataError naming file and line when a line is not UTF-8, is not JSON, is no object, or has no string in
    `text_field`; and when the file cannot be read or its compressed data is damaged or cut short.
    """
    number = 0
    try:
        for number, line in enumerate(_lines(path), start=1):
            yield number, _text(line, text_field) if line.strip() else None
    except _BadLineError as error:
        raise DataError(f"{path}, line {number}: {error}") from error
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{path}, after line {number}: cannot be read ({error}). Fetch or compress the file again"
        ) from error


class _BadLineError(Exception):
    """What is wrong with a line, and what to do."""


def _text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8 (byte {error.start + 1}). Convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"not JSON ({error}). Mend or remove the line") from error
    if not isinstance(record, dict):
        raise _BadLineError(f"a JSON {type(record).__name__} where an object was expected. Mend or remove the line")
    if text_field not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise _BadLineError(f"no field {text_field!r} (its fields: {keys}). Set data.text_field to the one with text")
    text = record[text_field]
    if not isinstance(text, str):
        raise _BadLineError(f"field {text_field!r} is {text!r:.60} where a string was expected. Mend the line")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadLineError(f"field {text_field!r} has half a surrogate pair. Mend or remove the line") from error
    return text


def _lines(path: Path) -> Iterator[bytes]:
    if path.name.endswith(".jsonl"):
        with path.open("rb") as file:
            yield from file
    elif path.name.endswith(".jsonl.gz"):
        with gzip.open(path) as unzipped:
            yield from unzipped
    elif path.name.endswith(".jsonl.zst"):
        tail = b""
        for block in _zst_blocks(path):
            *lines, tail = (tail + block).split(b"\n")
            yield from lines
        if tail:
            yield tail
    else:
        raise DataError(f"{path}: expected .jsonl, .jsonl.gz or .jsonl.zst. Rename it, or change data.pattern")


def _zst_blocks(path: Path) -> Iterator[bytes]:
    """The decompressed content of all frames; zstandard's own reader ends quietly where a frame was cut short."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            while chunk:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data
    if not frame.eof:
        raise EOFError("the last Zstandard frame is cut short")
