"""The folder of a run, and who may write into it."""

import fcntl
import os
from pathlib import Path
from typing import IO
from uuid import uuid4

from dilocox.config import Config, to_yaml
from dilocox.errors import ConfigError


def create_folder(config: Config) -> None:
    """Make the run's folder; raises ConfigError where it cannot be written."""
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        writable = os.access(config.run_dir, os.W_OK | os.X_OK)
        reason = "no permission to write"
    except OSError as error:
        writable, reason = False, error.strerror or str(error)
    if not writable:
        raise ConfigError(
            "runs_dir", config.runs_dir, f"{config.run_dir} cannot be used: {reason}", "Choose a folder of your own"
        )


def check_resume(config: Config) -> None:
    """Refuse a run to go on from that is not there."""
    if config.resume not in ("never", "auto") and not Path(config.resume).is_dir():
        raise ConfigError(
            "resume", config.resume, "no such folder", "Set resume=auto, or name a run's folder: runs_dir/NAME"
        )


def check_unused(config: Config) -> None:
    """Refuse a folder in which a run has already written, unless it is to be resumed."""
    if config.resume == "never" and any(config.run_dir.glob("island-*.lock")):
        raise ConfigError(
            "name",
            config.name,
            f"{config.run_dir} already holds a run",
            "Choose another name, set resume=auto to go on with it, or delete the folder",
        )


class RunFolder:
    """`runs_dir/name`, claimed by one island until it is closed; the claim ends with the process at the latest."""

    def __init__(self, config: Config, island: int) -> None:
        """Claim the folder; raises ConfigError when it holds another run, or this island runs right now."""
        self.path = config.run_dir
        lock = self.path / f"island-{island}.lock"
        if config.resume == "never" and lock.exists():
            check_unused(config)
        create_folder(config)
        self._lock: IO[str] = lock.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(
                "name",
                config.name,
                f"island {island} of this run is running now",
                "End it first, or choose another name",
            ) from error
        write_beside(self.path / "config.yaml", to_yaml(config))
        self._point_latest()

    def _point_latest(self) -> None:
        """Make `runs_dir/latest` a link to this run; islands may do so at the same time, to the same end."""
        link = self.path.parent / "latest"
        beside = beside_name(link)
        beside.symlink_to(self.path.name)
        beside.replace(link)

    def close(self) -> None:
        self._lock.close()


def write_beside(path: Path, text: str) -> None:
    """Replace a file by one that was written whole."""
    beside = beside_name(path)
    beside.write_text(text)
    beside.replace(path)


def beside_name(path: Path) -> Path:
    """A name that nobody else uses, on any machine that shares the folder (process ids repeat between machines)."""
    return path.with_name(f"{path.name}.{uuid4().hex}.tmp")
