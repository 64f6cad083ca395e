"""What the training loop tells, written down: one metrics file of all islands, and W&B where it is switched on."""

import hashlib
import math
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from dilocox.config import Config, Precision, Wandb, to_yaml
from dilocox.observe import environment, flops
from dilocox.observe.schema import (
    METRICS_FILE,
    Checkpoint,
    End,
    Evaluation,
    Record,
    Resume,
    Start,
    Step,
    Sync,
)
from dilocox.observe.wandb_sink import WandbSink
from dilocox.observe.writer import MetricsWriter
from dilocox.parameters import total_parameters


class Recorder:
    """Records of one island. All ranks may call it; only the leader (rank 0 of the island) writes.

    The first call is `start`, then `resume` unless the setting `resume` is `never`. A context manager: leaving it by an
    exception marks the W&B run as failed. Who takes the time of what is the caller's business.
    """

    def __init__(self, config: Config, island: int, *, leader: bool) -> None:
        """Open the run's metrics file; raises ConfigError when W&B is asked for and cannot be had."""
        self._config = config
        self._island = island
        self._writer: MetricsWriter | None = None
        self._sink: WandbSink | None = None
        self._flops_per_token = 0.0
        self._peak_flops: float | None = None
        self._unrecorded_steps = 0
        self._unrecorded_s = 0.0
        if leader:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            if config.observe.wandb is not Wandb.off:
                self._sink = WandbSink(config, island)
            self._writer = MetricsWriter(config.run_dir / METRICS_FILE)

    @property
    def _tokens_per_step(self) -> int:
        return self._config.island.batch_size * self._config.model.sequence_length

    def start(
        self,
        *,
        device: torch.device,
        precision: Precision,
        inner_optimizer: str,
        kernels: str,
        padded_vocab_size: int,
    ) -> None:
        """The island is built and about to train."""
        config, layout = self._config, self._config.island.layout
        name = environment.device_name(device)
        self._flops_per_token = flops.flops_per_token(config.model, padded_vocab_size)
        self._peak_flops = flops.peak_flops(name)
        if self._writer is None:
            return
        self._write(
            Start(
                time=time.time(),
                island=self._island,
                run=config.name,
                algo=config.algo_name,
                model=config.model.name,
                islands=config.islands,
                tp=layout.tp,
                pp=layout.pp,
                dp=layout.dp,
                steps=config.steps,
                tokens_per_step=self._tokens_per_step,
                parameters=total_parameters(config.model, padded_vocab_size),
                flops_per_token=self._flops_per_token,
                peak_flops=self._peak_flops,
                device=name,
                precision=precision.value,
                inner_optimizer=inner_optimizer,
                kernels=kernels,
                config_hash=hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16],
                commit=environment.git_commit(),
                versions=environment.versions(),
            )
        )

    def resume(self, *, step: int, path: str | None) -> None:
        """The island goes on at `step` from the checkpoint `path`; step 0 and no path where none was found."""
        self._write(Resume(time=time.time(), island=self._island, step=step, path=path))

    def step(self, *, step: int, loss: float, lr: float, grad_norm: float, tokens: int, seconds: float) -> None:
        """An inner step took `seconds` without syncs; `tokens` counts the island's since the start of the run."""
        self._unrecorded_steps += 1
        self._unrecorded_s += seconds
        if step % self._config.observe.log_every_steps and step != self._config.steps:
            return
        tokens_per_s = self._unrecorded_steps * self._tokens_per_step / max(self._unrecorded_s, 1e-9)
        self._write(
            Step(
                time=time.time(),
                island=self._island,
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=grad_norm,
                tokens=tokens,
                step_s=self._unrecorded_s / self._unrecorded_steps,
                tokens_per_s=tokens_per_s,
                mfu=flops.mfu(
                    tokens_per_s, self._flops_per_token, self._peak_flops, self._config.island.layout.world_size
                ),
            )
        )
        self._unrecorded_steps, self._unrecorded_s = 0, 0.0

    def sync(
        self,
        *,
        step: int,
        round: int,
        number: int,
        fragment: str,
        seconds: float,
        wait_s: float,
        attempts: int,
        bytes_sent: int,
        bytes_received: int,
        bytes_inside: int,
        parameters: int,
        pseudo_gradient_norm: float,
        pseudo_gradient_max: float,
        checksum: int,
    ) -> None:
        """A sync was committed; `bytes_inside` counts from the sync before it (or the start of this launch)."""
        self._write(
            Sync(
                time=time.time(),
                island=self._island,
                step=step,
                round=round,
                number=number,
                fragment=fragment,
                seconds=seconds,
                wait_s=wait_s,
                attempts=attempts,
                bytes_sent=bytes_sent,
                bytes_received=bytes_received,
                bytes_inside=bytes_inside,
                parameters=parameters,
                bits_per_parameter=8 * bytes_sent / parameters,
                pseudo_gradient_norm=pseudo_gradient_norm,
                pseudo_gradient_max=pseudo_gradient_max,
                checksum=f"{checksum:016x}",
            )
        )

    def evaluation(self, *, step: int, round: int, loss: float) -> None:
        """The held-out loss of the anchor, in nats a token."""
        self._write(
            Evaluation(
                time=time.time(),
                island=self._island,
                step=step,
                round=round,
                of="anchor",
                loss=loss,
                perplexity=perplexity(loss),
            )
        )

    def checkpoint(self, *, step: int, round: int, seconds: float, bytes: int, path: str) -> None:
        """A checkpoint is whole on disk."""
        self._write(
            Checkpoint(
                time=time.time(), island=self._island, step=step, round=round, seconds=seconds, bytes=bytes, path=path
            )
        )

    def end(
        self,
        *,
        step: int,
        round: int,
        tokens: int,
        bytes_inside: int,
        parameter_hash: str,
        peak_memory_bytes: Sequence[int],
    ) -> None:
        """All steps are done; `peak_memory_bytes` by rank of the island."""
        self._write(
            End(
                time=time.time(),
                island=self._island,
                step=step,
                round=round,
                tokens=tokens,
                bytes_inside=bytes_inside,
                parameter_hash=parameter_hash,
                peak_memory_bytes=list(peak_memory_bytes),
            )
        )

    def _write(self, record: Record) -> None:
        if self._writer is None:
            return
        self._writer.write(record)
        if self._sink is not None:
            self._sink.log(record)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._sink is not None:
            self._sink.close(failed=error is not None)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
