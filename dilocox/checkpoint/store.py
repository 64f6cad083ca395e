"""Save and load an island, all its ranks together."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dilocox.checkpoint.files import (
    FORMAT,
    Manifest,
    check_about,
    check_files,
    commit,
    partial_folder,
    prepare,
    prune,
    read_manifest,
    record,
    step_folder,
)
from dilocox.checkpoint.planner import ChunkLoadPlanner, ChunkSavePlanner, Shards, cut, describe
from dilocox.checkpoint.together import agree, gather, in_words, place
from dilocox.errors import CheckpointError

Described = Mapping[str, Mapping[str, Any]]


def save(
    folder: Path,
    *,
    step: int,
    shards: Shards,
    rank_tensors: Mapping[str, Tensor],
    state: Mapping[str, object],
    about: Mapping[str, object],
    group: ProcessGroup | None,
    keep_last: int,
) -> Path:
    """Write this island's checkpoint of inner step `step` into `folder`, and delete all but the newest `keep_last`.

    Collective over `group`, all ranks of the island (None: it is one rank). `shards` are saved by kind and parameter
    name; `rank_tensors` and `state` (JSON-able, string keys) are this rank's own; `about` (JSON-able, equal on all
    ranks) says what it is: round, island, layout, identity. A checkpoint of the same step is replaced, later ones are
    deleted. Returns its path. Raises CheckpointError on every rank when anything could not be written; earlier
    checkpoints are then as they were.
    """
    rank, ranks = place(group)
    partial = partial_folder(folder, step)

    def on_first(action: Callable[[], None]) -> None:
        agree(group, folder, lambda: action() if rank == 0 else None)

    on_first(lambda: prepare(folder, step))
    try:
        agree(group, folder, lambda: _check_visible(partial))
        tensors = _merge(gather(group, describe(shards)))
        _save_tensors(partial, shards, group)
        files = agree(group, partial, lambda: _save_rank(partial, rank, rank_tensors, state))
        everyones = {name: entry for written in gather(group, files) for name, entry in written.items()}
        manifest = Manifest(FORMAT, step, ranks, dict(about), tensors, everyones)
        on_first(lambda: commit(folder, manifest))
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    on_first(lambda: prune(folder, newest=step, keep_last=keep_last))
    return step_folder(folder, step)


def load(
    path: Path, *, shards: Shards, group: ProcessGroup | None, expected: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load a whole checkpoint into `shards`, in place; returns this rank's (state, tensors on the CPU).

    Collective over `group`, with as many ranks as it was saved by. Fields of `expected` must be in the checkpoint's
    `about` with the same values. Everything is verified before anything is overwritten: raises CheckpointError on every
    rank when a file is missing or damaged, or the checkpoint is of another model, layout or run, naming the difference.
    """
    rank, ranks = place(group)

    def check() -> Manifest:
        manifest = read_manifest(path)
        check_about(path, manifest, expected)
        if manifest.ranks != ranks:
            raise CheckpointError(
                f"{path} was saved by {manifest.ranks} ranks, this island has {ranks}: the random streams and data "
                f"positions of ranks cannot be dealt to others. Resume with the layout that it was saved with"
            )
        return manifest

    manifest = agree(group, path, check)
    _load_tensors(path, manifest, shards, group, kinds={key.split("/")[0] for key in manifest.tensors})
    return agree(group, path, lambda: _load_rank(path, rank))


def load_tensors(path: Path, *, shards: Shards, group: ProcessGroup | None) -> Manifest:
    """Load the kinds in `shards` only, in place, on whatever layout and number of ranks; returns the manifest.

    Collective over `group`. Raises CheckpointError as `load`, also when parameter names, shapes or dtypes differ.
    """
    manifest = agree(group, path, lambda: read_manifest(path))
    _load_tensors(path, manifest, shards, group, kinds=set())
    return manifest


def _check_visible(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial} was made by the island's first rank and is not seen by another. "
            f"Put checkpoints on a file system that all ranks of an island share"
        )


def _merge(described: Sequence[Described]) -> dict[str, dict[str, Any]]:
    """All ranks' tensors in one, equal on all ranks; refuses ranks that disagree about one."""
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in described:
        for key, tensor in of_rank.items():
            if merged.setdefault(key, dict(tensor)) != tensor:
                raise CheckpointError(f"{key}: ranks of this island disagree about it: {merged[key]} and {tensor}")
    return merged


def _save_tensors(partial: Path, shards: Shards, group: ProcessGroup | None) -> None:
    def run() -> None:
        dcp.save(
            {},
            storage_writer=_Writer(partial, sync_files=False),  # `record` does, and the index as well
            planner=ChunkSavePlanner(cut(shards)),
            process_group=group,
            no_dist=group is None,
        )

    _translate(partial, run)


class _Writer(dcp.FileSystemWriter):
    """Reports what the system said when a write failed, also to other ranks, which see no chain of errors."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise CheckpointError(in_words(error)) from error


def _load_tensors(
    path: Path, manifest: Manifest, shards: Shards, group: ProcessGroup | None, *, kinds: set[str]
) -> None:
    """Verify all files, each on one rank, and the model, then read; `kinds` are wanted besides those in `shards`."""
    rank, ranks = place(group)
    wanted = _merge(gather(group, describe(shards)))
    _check_model(path, manifest.tensors, wanted, kinds)
    agree(group, path, lambda: check_files(path, manifest, sorted(manifest.files)[rank::ranks]))

    def run() -> None:
        dcp.load(
            {},
            storage_reader=dcp.FileSystemReader(path),
            planner=ChunkLoadPlanner(cut(shards)),
            process_group=group,
            no_dist=group is None,
        )

    with torch.no_grad():
        _translate(path, run)


def _translate(path: Path, run: Callable[[], None]) -> None:
    """Turn torch's error, which it raises on all ranks with a traceback of each, into the first rank's message."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # an island of one rank
            run()
    except CheckpointException as failed:
        rank, (cause, _) = min(failed.failures.items())
        if not isinstance(cause, Exception):
            raise
        what = str(cause) if isinstance(cause, CheckpointError) else in_words(cause)
        raise CheckpointError(f"{path}, rank {rank}: {what}") from failed


def _check_model(path: Path, stored: Described, wanted: Described, kinds: set[str]) -> None:
    """Raise CheckpointError naming the first tensor that is on one side only or of another shape or dtype."""
    kinds = kinds | {key.split("/")[0] for key in wanted}
    stored = {key: tensor for key, tensor in stored.items() if key.split("/")[0] in kinds}
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            there, here = (_in_words(side.get(key)) for side in (stored, wanted))
            raise CheckpointError(
                f"{path} is of another model or method: {key} is {there} in the checkpoint and {here} in this run. "
                f"Set the model and the method as they were, or start a new run"
            )


def _in_words(tensor: Mapping[str, Any] | None) -> str:
    return "absent" if tensor is None else f"{tensor['dtype']}{tensor['shape']}"


def _save_rank(
    partial: Path, rank: int, rank_tensors: Mapping[str, Tensor], state: Mapping[str, object]
) -> dict[str, dict[str, Any]]:
    """Write this rank's own files; returns the manifest's entries of all files that this rank wrote."""
    tensors_file, state_file = _rank_files(partial, rank)
    state_file.write_text(json.dumps(state, sort_keys=True, indent=1))
    with tensors_file.open("wb") as stream:
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in rank_tensors.items()}, stream)
    written = [state_file, tensors_file, *partial.glob(f"__{rank}_*.distcp")]
    if rank == 0:
        written.append(partial / ".metadata")
    return {file.name: record(file) for file in written}


def _load_rank(path: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors_file, state_file = _rank_files(path, rank)
    return json.loads(state_file.read_text()), torch.load(tensors_file, map_location="cpu", weights_only=True)


def _rank_files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank:05d}.pt", folder / f"rank-{rank:05d}.json"
