"""Appending records to a metrics file that several processes write."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dilocox.observe.schema import Record, to_line


class MetricsWriter:
    """Appends whole lines to `path`, each in one write under a lock, so that islands can share the file.

    The lock also holds between machines where the file system has `flock`; a plain append over NFS would not.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file; a line that a crash has torn at its end is closed, not continued."""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        with self._locked():
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")

    def write(self, record: Record) -> None:
        """Append one record; raises OSError when it could not be written whole."""
        line = to_line(record).encode()
        with self._locked():
            written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"metrics: only {written} of {len(line)} bytes could be written; is the disk full?")

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
