"""The files of a checkpoint: names, the manifest, checksums, and folders that appear and go by one rename."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and which files it consists of."""

    format: int
    step: int
    """Inner steps of this island when it was saved."""
    ranks: int
    about: dict[str, Any]
    """What the caller said: round, islands, island, layout, identity, …"""
    tensors: dict[str, dict[str, Any]]
    """By "kind/parameter": {"shape": global shape, "dtype": …}."""
    files: dict[str, dict[str, Any]]
    """By name inside the folder: {"bytes": size, "sha256": …}."""


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of this inner step is, or would be."""
    return folder / f"step-{step:08d}"


def rounds(folder: Path) -> list[int]:
    """Inner steps of the whole checkpoints in an island's folder, oldest first; none where there is no folder.

    Raises CheckpointError when one that was whole has lost its manifest since, rather than passing over it.
    """
    found = sorted(steps_in(folder))
    for step in found:
        read_manifest(step_folder(folder, step))
    return found


def steps_in(folder: Path) -> list[int]:
    """Inner steps of the finished folders (not partial ones), in no order."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in names if match]


def newest_common(held: Iterable[Sequence[int]]) -> int | None:
    """The newest inner step whose checkpoint every island holds, from all islands' `rounds`."""
    common = set.intersection(*map(set, held))
    return max(common) if common else None


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint; raises CheckpointError that names the file which is not as it was written."""
    manifest = read_manifest(path)
    check_files(path, manifest, manifest.files)
    return manifest


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare sizes and checksums of some files of a checkpoint; raises CheckpointError."""
    for name in names:
        file, expected = path / name, manifest.files[name]
        if not file.is_file():
            raise CheckpointError(f"{file} is missing. {_remedy(path)}")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, {expected['bytes']} were written. {_remedy(path)}")
        if _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of what was written. {_remedy(path)}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError when it is missing, damaged or of another format."""
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        content = json.loads(text)
        found = content["format"]
        if found == FORMAT:
            manifest = Manifest(**{name: value for name, value in content.items() if name != "sha256"})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}. {_remedy(path)}") from error
    if found != FORMAT:
        raise CheckpointError(f"{file} has format {found!r}, this version of dilocox reads format {FORMAT}")
    if _render(manifest) != text:
        raise CheckpointError(f"{file} is damaged: it does not have the checksum that it names. {_remedy(path)}")
    return manifest


def _remedy(path: Path) -> str:
    return f"Copy it again, or delete {path} to go on from an older checkpoint"


def _render(manifest: Manifest) -> bytes:
    """A manifest as JSON that names the checksum of its other fields."""
    content = asdict(manifest)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, sort_keys=True, indent=1).encode()


def record(file: Path) -> dict[str, Any]:
    """Push a written file to the disk; returns its size and checksum for the manifest."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def prepare(folder: Path, step: int) -> None:
    """Make an empty partial folder for this step, and remove what saves that did not end have left."""
    final = step_folder(folder, step)
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is in the way: a checkpoint is a folder. Move it elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover)
    partial_folder(folder, step).mkdir()


def partial_folder(folder: Path, step: int) -> Path:
    """Where this step's checkpoint is written, until it is whole."""
    final = step_folder(folder, step)
    return final.with_name(final.name + PARTIAL)


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a partial folder, whose other files are on disk, the checkpoint of its step."""
    final, partial = step_folder(folder, manifest.step), partial_folder(folder, manifest.step)
    (partial / MANIFEST).write_bytes(_render(manifest))
    record(partial / MANIFEST)
    _sync_folder(partial)
    replaced = _unlist(final) if final.exists() else None
    partial.rename(final)
    _sync_folder(folder)
    if replaced:
        shutil.rmtree(replaced)


def prune(folder: Path, *, newest: int, keep_last: int) -> None:
    """Delete all but the last `keep_last` checkpoints up to step `newest`.

    Later ones are deleted too: training went back behind them, and what follows is another history.
    """
    steps = sorted(steps_in(folder))
    keep = [step for step in steps if step <= newest][-keep_last:]
    for step in steps:
        if step not in keep:
            shutil.rmtree(_unlist(step_folder(folder, step)))


def _unlist(path: Path) -> Path:
    """Rename a checkpoint that is to be deleted, so that it is whole as long as it is listed; returns its new path."""
    return path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_about(path: Path, manifest: Manifest, expected: Mapping[str, object]) -> None:
    """Raise CheckpointError naming the first field of `expected` of which the checkpoint says something else."""
    for field, value in json.loads(json.dumps(expected)).items():
        if manifest.about.get(field) != value:
            raise CheckpointError(
                f"{path} was saved with {field}={manifest.about.get(field)!r}, this run has {value!r}. "
                f"Set it as it was, or load the tensors alone"
            )
