"""Reading metrics files: whole, by the resume rule, or as they grow."""

from collections.abc import Iterable
from pathlib import Path

from dilocox.observe.schema import End, MetricsError, Record, Resume, from_line


def read(path: Path) -> list[Record]:
    """The records of a file that count: torn lines skipped, and what a resume cancelled left out.

    Raises MetricsError, naming file, line and field, when the file does not follow the schema.
    """
    return current(Tail(path).read())


def current(records: Iterable[Record]) -> list[Record]:
    """What is left of records, in their order, after each `resume` among them."""
    kept: list[Record] = []
    for record in records:
        if isinstance(record, Resume):
            kept = [before for before in kept if not cancels(record, before)]
        kept.append(record)
    return kept


def cancels(resume: Resume, before: Record) -> bool:
    """Whether `resume` cancels a record that was written before it."""
    if resume.island != before.island:
        return False
    step: int | None = getattr(before, "step", None)
    return isinstance(before, End) or (step is not None and (step > resume.step or resume.step == 0))


class Tail:
    """Reads what was appended since the last call; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = 0

    def read(self) -> list[Record]:
        """The records of whole new lines, as written (no resume rule). Raises MetricsError as `read` does."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            self._lines += 1
            if line.endswith(b"}"):
                records.append(self._parse(line))
        return records

    def _parse(self, line: bytes) -> Record:
        try:
            return from_line(line.decode())
        except (MetricsError, UnicodeDecodeError) as error:
            raise MetricsError(
                f"{self._path}, line {self._lines}: {error}. Was it written by another version, or edited?"
            ) from error
