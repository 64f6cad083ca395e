"""What the training loop measures of itself on the way to the record: seconds, bytes, hashes, memory."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dilocox.checkpoint.together import gather
from dilocox.config import Config
from dilocox.errors import DriftError
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import World
from dilocox.observe.environment import peak_memory_bytes
from dilocox.observe.recorder import Recorder
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.loop import OuterLoop
from dilocox.outer.sync import SyncReport
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.outer.transport.share import share
from dilocox.parameter_hash import parameter_hash
from dilocox.traffic import InsideMeter


class Reporter:
    """One island's progress. All its ranks call every method: sums are taken over them, and the leader's is written."""

    def __init__(
        self,
        recorder: Recorder,
        config: Config,
        world: World,
        island: MegatronIsland,
        outer: OuterLoop,
        lane_group: LaneGroup,
        meter: InsideMeter,
    ) -> None:
        self._recorder = recorder
        self._config = config
        self._world = world
        self._island = island
        self._outer = outer
        self._lane_group = lane_group
        self._meter = meter
        self._group = IslandGroup(world.group, world.device)
        self._bytes_inside = meter.bytes_sent
        self._tokens_per_step = config.island.batch_size * config.model.sequence_length

    def start(self, vocab_size: int) -> None:
        """The island is built; `vocab_size` is the tokenizer's."""
        self._recorder.start(
            device=self._world.device,
            precision=self._island.precision,
            inner_optimizer=self._island.inner_optimizer_name,
            kernels=self._outer.kernels_name,
            padded_vocab_size=self._config.model.padded_vocab(vocab_size),
        )

    def resumed(self, path: Path | None) -> None:
        self._recorder.resume(step=self._outer.inner_steps, path=None if path is None else str(path))

    def evaluation(self, loss: float) -> None:
        self._recorder.evaluation(step=self._outer.inner_steps, round=self._outer.rounds, loss=loss)

    def step(
        self, loss: float, gradient_norm: float, learning_rate: float, seconds: float, syncs: Sequence[SyncReport]
    ) -> None:
        """An inner step is done; `seconds` counts it with the `syncs` that it completed."""
        self._recorder.step(
            step=self._outer.inner_steps,
            loss=loss,
            lr=learning_rate,
            grad_norm=gradient_norm,
            tokens=self._outer.inner_steps * self._tokens_per_step,
            seconds=seconds - sum(sync.seconds for sync in syncs),
        )
        for sync in syncs:
            self._recorder.sync(
                step=self._outer.inner_steps,
                round=self._outer.rounds,
                number=sync.number,
                fragment=sync.fragment,
                seconds=sync.seconds,
                wait_s=sync.seconds_waiting,
                attempts=sync.attempts,
                bytes_sent=sync.bytes_sent,
                bytes_received=sync.bytes_received,
                bytes_inside=self._new_bytes_inside(),
                parameters=sync.elements,
                pseudo_gradient_norm=sync.pseudo_gradient_norm,
                pseudo_gradient_max=sync.pseudo_gradient_max,
                checksum=sync.checksum,
            )

    def checkpoint(self, save: Callable[[], Path]) -> None:
        """Save, and record how long it took and how much it wrote."""
        started = time.monotonic()
        path = save()
        self._recorder.checkpoint(
            step=self._outer.inner_steps,
            round=self._outer.rounds,
            seconds=time.monotonic() - started,
            bytes=sum(file.stat().st_size for file in path.iterdir()),
            path=str(path),
        )

    def end(self) -> None:
        """Training is over: compare the islands' weights once more, and record what the run came to."""
        mine = parameter_hash(self._island.weights(), self._group)
        deadline = time.monotonic() + self._config.participation["timeout_s"]
        hashes = [reply.decode() for reply in share(self._lane_group.transport, mine.encode(), deadline)]
        if len(set(hashes)) > 1:
            raise DriftError(f"the islands end with different weights: {hashes}. Resume from the last checkpoint")
        self._recorder.end(
            step=self._outer.inner_steps,
            round=self._outer.rounds,
            tokens=self._outer.inner_steps * self._tokens_per_step,
            bytes_inside=self._new_bytes_inside(),
            parameter_hash=mine,
            peak_memory_bytes=gather(self._world.group, peak_memory_bytes(self._world.device)),
        )

    def _new_bytes_inside(self) -> int:
        """Bytes sent inside the island, by all its ranks, since the last call."""
        before, self._bytes_inside = self._bytes_inside, self._meter.bytes_sent
        return int(self._group.sum([self._bytes_inside - before])[0])
