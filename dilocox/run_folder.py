"""The folder of a run, and who may write into it."""

import fcntl
import os
from pathlib import Path
from typing import IO

from dilocox.config import Config, to_yaml
from dilocox.errors import ConfigError
from dilocox.files import beside_name, write_beside

CONFIG_FILE = "config.yaml"
"""The resolved configuration. Where it is, a run has begun."""


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
    """Refuse a folder in which a run has begun, unless it is to be resumed."""
    if config.resume == "never" and (config.run_dir / CONFIG_FILE).exists():
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
        self._config = config
        check_unused(config)
        create_folder(config)
        self._lock: IO[str] = (self.path / f"island-{island}.lock").open("a")
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

    def begin(self) -> None:
        """Record the configuration, and let `runs_dir/latest` point here; nothing of an earlier launch is lost before.

        Call it when nothing can be refused any more: the islands have met, and a checkpoint to go on from is loaded.
        """
        write_beside(self.path / CONFIG_FILE, to_yaml(self._config))
        self._point_latest()

    def _point_latest(self) -> None:
        """Make `runs_dir/latest` a link to this run; islands may do so at the same time, to the same end."""
        link = self.path.parent / "latest"
        beside = beside_name(link)
        beside.symlink_to(self.path.name)
        beside.replace(link)

    def close(self) -> None:
        self._lock.close()
