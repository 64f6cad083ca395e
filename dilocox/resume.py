"""Which checkpoint a run goes on from, and what of an island goes into one and comes back."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from dilocox import checkpoint
from dilocox.checkpoint.files import steps_in
from dilocox.checkpoint.planner import Shards
from dilocox.checkpoint.together import gather, place
from dilocox.config import Config
from dilocox.data.corpus import Corpus
from dilocox.errors import CheckpointError
from dilocox.identity import check_checkpoint
from dilocox.islands.megatron import MegatronIsland
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.outer.transport.share import share


@dataclass(frozen=True)
class Resumable:
    """Everything of one island that must survive: saved and taken up together, by all its ranks."""

    config: Config
    island_id: int
    island: MegatronIsland
    outer: OuterLoop
    corpus: Corpus
    identity: Mapping[str, object]

    def save(self) -> Path:
        """Write a checkpoint of this round's end; returns its folder. Collective over the island."""
        return checkpoint.save(
            island_folder(self.config.run_dir, self.island_id),
            step=self.outer.inner_steps,
            shards=self._shards(),
            rank_tensors=self.island.random.state(),
            state={
                "island": self.island.state(),
                "outer": self.outer.state(),
                "data": self.corpus.train.position(),
            },
            about={"identity": dict(self.identity), "island": self.island_id, "round": self.outer.rounds},
            group=self.island.group,
            keep_last=self.config.checkpoint.keep_last,
        )

    def load(self, path: Path) -> None:
        """Take up a checkpoint; raises CheckpointError when it is damaged or this run cannot go on from it."""
        check_checkpoint(self.identity, checkpoint.read_manifest(path).about["identity"], path)
        state, random = checkpoint.load(
            path, shards=self._shards(), group=self.island.group, expected={"island": self.island_id}
        )
        self.island.load_state(state["island"])
        self.island.random.load_state(random)
        self.island.publish()
        self.outer.load_state(state["outer"])
        self.corpus.train.seek(state["data"])

    def _shards(self) -> Shards:
        inner = {f"inner.{kind}": shards for kind, shards in self.island.optimizer_state().items()}
        outer = {f"outer.{kind}": shards for kind, shards in self.outer.tensors().items()}
        return {"weights": self.island.weights()} | inner | outer


def find(config: Config, island_id: int, group: ProcessGroup | None, lane_group: LaneGroup) -> Path | None:
    """The checkpoint to resume from: this island's part of the newest round that all islands hold whole.

    Collective over all ranks of all islands. `resume=auto` looks into this run's own folder, and None means that there
    is nothing to go on from; otherwise `resume` names a run's folder, and CheckpointError is raised when there is none.
    """
    if config.resume == "never":
        return None
    run = config.run_dir if config.resume == "auto" else Path(config.resume)
    folder = island_folder(run, island_id)
    rank, _ = place(group)
    held = gather(group, _whole(folder) if rank == 0 else [])[0]
    deadline = time.monotonic() + config.participation["timeout_s"]
    everyones = share(lane_group.transport, json.dumps(held).encode(), deadline)
    step = checkpoint.newest_common([json.loads(steps) for steps in everyones])
    if step is not None:
        return checkpoint.step_folder(folder, step)
    if config.resume == "auto":
        return None
    raise CheckpointError(
        f"resume={config.resume}: no round that all {config.islands} islands hold whole; "
        f"island {island_id} holds steps {held} in {folder}. Name a run's folder (runs/NAME), or set resume=never"
    )


def island_folder(run: Path, island: int) -> Path:
    return run / "checkpoints" / f"island{island}"


def _whole(folder: Path) -> list[int]:
    """Steps of the undamaged checkpoints in an island's folder; says which are damaged."""
    whole = []
    for step in sorted(steps_in(folder)):
        try:
            checkpoint.verify(checkpoint.step_folder(folder, step))
            whole.append(step)
        except CheckpointError as error:
            print(f"dilocox: not resuming from step {step}: {error}", flush=True)
    return whole
