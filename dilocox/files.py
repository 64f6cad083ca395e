"""Files that are written whole: under another name first, then renamed."""

from pathlib import Path
from uuid import uuid4


def write_beside(path: Path, text: str) -> None:
    """Replace a file by one that was written whole."""
    beside = beside_name(path)
    beside.write_text(text)
    beside.replace(path)


def beside_name(path: Path) -> Path:
    """A name that nobody else uses, on any machine that shares the folder (process ids repeat between machines)."""
    return path.with_name(f"{path.name}.{uuid4().hex}.tmp")
