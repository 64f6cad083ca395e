"""The same records in Weights & Biases: a run for each island, grouped by the name of the training run."""

from typing import Any

from dilocox.config import Config, Wandb
from dilocox.errors import ConfigError
from dilocox.observe.schema import Checkpoint, End, Evaluation, Record, Start, Step, Sync

LOGGED = (Step, Sync, Evaluation, Checkpoint)
"""Kinds that become history, as `island0/step/loss` over `inner_step`; Start and End go to config and summary."""


class WandbSink:
    """One island's W&B run. Offline, its files are in the folder `wandb` of the training run, for `wandb sync`.

    A resumed island is a new W&B run of the same group.
    """

    def __init__(self, config: Config, island: int) -> None:
        """Start the W&B run in the training run's folder, which must exist.

        Raises ConfigError when W&B cannot be had, instead of asking at the terminal.
        """
        import wandb  # its import takes most of a second, and most runs do without

        self._prefix = f"island{island}"
        mode = config.observe.wandb
        if mode is Wandb.online and not wandb.login(prompt=False):
            raise ConfigError(
                "observe.wandb",
                mode.value,
                "this machine is not logged in to Weights & Biases",
                "Run `wandb login`, set WANDB_API_KEY, or set observe.wandb=offline and `wandb sync` later",
            )
        try:
            self._run: Any = wandb.init(
                mode="online" if mode is Wandb.online else "offline",
                project=config.observe.wandb_project,
                group=config.name,
                name=f"{config.name}-{self._prefix}",
                dir=config.run_dir,
                reinit="create_new",  # islands in one process each keep their own
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                "observe.wandb",
                mode.value,
                f"Weights & Biases refuses: {error}",
                "Check the project and the network, or set observe.wandb=offline",
            ) from error
        self._run.define_metric("inner_step")
        self._run.define_metric(f"{self._prefix}/*", step_metric="inner_step")

    def log(self, record: Record) -> None:
        values = {name: value for name, value in vars(record).items() if name not in ("time", "island")}
        if isinstance(record, Start):
            self._run.config.update(values)
        elif isinstance(record, End):
            self._run.summary.update(self._named(record, values))
        elif isinstance(record, LOGGED):
            step = values.pop("step")
            self._run.log({"inner_step": step} | self._named(record, values))

    def _named(self, record: Record, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}/{record.kind}/{name}": value for name, value in values.items() if value is not None}

    def close(self, *, failed: bool) -> None:
        """End the W&B run, marked as failed or not; waits until all is on disk or uploaded."""
        self._run.finish(exit_code=int(failed))
