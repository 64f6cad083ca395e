"""Sources: where documents come from. Each is read in one pass, in an order that no file system decides."""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from dilocox.config import DataConfig, Source
from dilocox.data.jsonl import read_texts
from dilocox.errors import ConfigError, DataError

# Not the library's own source: other packages, byte code, and what a build writes about itself, which would make
# two installations of one Python differ.
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "config-*", "_sysconfigdata_*")


@dataclass(frozen=True)
class Document:
    """One text. `id` names it whatever folder the corpus lies in: `json/decoder.py`, `part-3.jsonl.gz#17`.

    A line's id is its number: lines may be appended to a file without changing those before.
    """

    id: str
    text: str


class DocumentSource(Protocol):
    """A corpus as it lies on disk."""

    skipped: Counter[str]
    """How many documents were left out, by reason; complete once `documents` is exhausted."""

    def documents(self) -> Iterator[Document]:
        """All documents, sorted by file name and line. Raises DataError or ConfigError for what cannot be read."""


class TextFiles:
    """A document for each file of a folder whose path matches a pattern.

    Files that are empty, binary or not UTF-8 are skipped and counted if `skip_unreadable`; otherwise they are a
    DataError that names the first one, raised when all have been seen.
    """

    def __init__(self, folder: Path, pattern: str, *, excluded: tuple[str, ...], skip_unreadable: bool) -> None:
        self.skipped: Counter[str] = Counter()
        self._folder = folder
        self._pattern = pattern
        self._excluded = excluded
        self._skip_unreadable = skip_unreadable

    def documents(self) -> Iterator[Document]:
        names = list_files(self._folder, self._pattern, self._excluded)
        first: tuple[str, str] | None = None
        for name in names:
            content = _read(self._folder / name)
            text, problem = _as_text(content)
            if not problem:
                yield Document(name, text)
                continue
            self.skipped[problem] += 1
            first = first or (name, problem)
        if first and not self._skip_unreadable:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
            raise DataError(
                f"{self._folder / first[0]} is {first[1]}. Of {len(names)} files in data.path={str(self._folder)!r}, "
                f"these hold no text: {counts}. Remove them, or leave them out with data.pattern "
                f"(now {self._pattern!r}; '**/*.txt' takes one kind of file)"
            )


class JsonLines:
    """A document for each line of JSON lines files; blank lines and empty texts are skipped and counted."""

    def __init__(self, path: Path, pattern: str, text_field: str) -> None:
        self.skipped: Counter[str] = Counter()
        self._path = path
        self._pattern = pattern
        self._text_field = text_field

    def documents(self) -> Iterator[Document]:
        for folder, name in self._files():
            found = 0
            for line, text in read_texts(folder / name, self._text_field):
                if text:
                    found += 1
                    yield Document(f"{name}#{line}", text)
                else:
                    self.skipped["blank line" if text is None else "empty text"] += 1
            if not found:
                raise DataError(f"{folder / name} holds no text at all. Remove it, or leave it out with data.pattern")

    def _files(self) -> list[tuple[Path, str]]:
        if self._path.is_file():
            return [(self._path.parent, self._path.name)]
        return [(self._path, name) for name in list_files(self._path, self._pattern, ())]


def open_source(data: DataConfig) -> DocumentSource:
    """The source that a configuration describes. Raises ConfigError when its path is missing."""
    if data.source is Source.stdlib:
        if data.path is not None:
            raise ConfigError("data.path", data.path, "data=stdlib reads no path", "Use data=folder or data=jsonl")
        folder = Path(sysconfig.get_paths()["stdlib"])
        return TextFiles(folder, data.pattern, excluded=NOT_STDLIB, skip_unreadable=True)
    if data.path is None:
        raise ConfigError("data.path", None, f"data={data.source.value} reads one", "Set data.path to a folder")
    path = Path(data.path).expanduser()
    if not path.exists():
        raise ConfigError("data.path", data.path, "no such file or folder", f"Check it: it is {path.absolute()} here")
    if data.source is Source.jsonl:
        return JsonLines(path, data.pattern, data.text_field)
    if not path.is_dir():
        raise ConfigError("data.path", data.path, "is a file", "Set it to its folder and data.pattern to its name")
    return TextFiles(path, data.pattern, excluded=(), skip_unreadable=False)


def list_files(folder: Path, pattern: str, excluded: tuple[str, ...]) -> list[str]:
    """The files below a folder as sorted relative POSIX paths. Raises DataError when none matches.

    In a pattern `**` stands for folders at any depth, `*`, `?` and `[…]` for part of one name. Names that begin with a
    dot or match one of `excluded` are left out with all below them. Links to files are followed; a link to a folder
    is listed as if it were a file, so that reading it fails instead of losing its contents in silence.
    """
    parts = tuple(pattern.split("/"))
    found: list[str] = []
    pending: list[tuple[str, ...]] = [()]
    while pending:
        above = pending.pop()
        for entry in _entries(folder.joinpath(*above)):
            path = (*above, entry.name)
            if any(fnmatchcase(entry.name, skip) for skip in (".*", *excluded)):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            elif (entry.is_file() or entry.is_symlink()) and _matches(path, parts):
                found.append("/".join(path))
    if not found:
        raise DataError(f"data.pattern={pattern!r} matches no file in {folder}. Change it, or data.path")
    return sorted(found)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}. Mend it or change data.path") from error


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern or not path:
        return not path and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or _matches(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Mend it, or leave it out with data.pattern"
        ) from error


def _as_text(content: bytes) -> tuple[str, str]:
    """The text of a file, and what is wrong with it ("" if nothing)."""
    if not content:
        return "", "empty"
    if b"\0" in content:
        return "", "binary"
    try:
        return content.decode(), ""
    except UnicodeDecodeError:
        return "", "not UTF-8"
