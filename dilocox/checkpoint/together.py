"""Steps that all ranks of an island take together: where one fails, all of them raise the same error."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dilocox.errors import CheckpointError

T = TypeVar("T")


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) in an island's group; None is an island of one rank."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gather(group: ProcessGroup | None, value: T) -> list[T]:
    """Everybody's value, by rank."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def agree(group: ProcessGroup | None, what: object, step: Callable[[], T]) -> T:
    """Run `step` on every rank and return its own result, once it has succeeded on all of them.

    Raises CheckpointError on every rank otherwise, with the first failed rank's message; `what` (the path that is read
    or written) leads the message where the failure does not name it.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    failures = [message for message in gather(group, _message(what, error)) if message]
    if failures:
        raise CheckpointError(failures[0]) from error
    return result


def _message(what: object, error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{what}: {in_words(error)}"


def in_words(error: BaseException) -> str:
    """The system's error behind an error, if any: torch follows a full disk up with a complaint of its own."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    cause = behind or error
    return f"{type(cause).__name__}: {cause}"
