"""The whole training loop on one page: build the island and the outer loop, step, sync, evaluate, checkpoint.

One call of `train` is one rank of one island. Launchers decide which processes or threads call it.
"""

import math
from collections.abc import Callable, Mapping

from dilocox import checkpoint
from dilocox.config import ROLES, Config, StateDevice, build_role
from dilocox.data.corpus import Corpus, open_corpus
from dilocox.errors import NonFiniteError
from dilocox.identity import identity_of
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import World
from dilocox.observe.recorder import Recorder
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.roles import Roles
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.resume import Resumer
from dilocox.run_folder import RunFolder

Meet = Callable[[Mapping[str, object]], LaneGroup]
"""Connects this lane with the same lane of the other islands, once all have shown the same identity."""


def train(config: Config, island_id: int, world: World, meet: Meet) -> None:
    """Train island `island_id` on this rank, from the start or from a checkpoint, to `config.steps` inner steps.

    All ranks of all islands run it. Raises a DilocoxError that says what went wrong and what to do; whatever was
    checkpointed before is then untouched.
    """
    corpus = open_corpus(
        config.data,
        islands=config.islands,
        island=island_id,
        dp=world.layout.dp,
        dp_rank=world.lane.dp,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        micro_batch_size=config.island.micro_batch_size,
        batch_size=config.island.batch_size,
    )
    island = MegatronIsland(
        world,
        model=config.model,
        island=config.island,
        inner=config.inner,
        vocab_size=corpus.tokenizer.vocab_size,
        seed=config.seed,
    )
    island_group = IslandGroup(world.group, world.device)
    documents = int(island_group.sum([corpus.documents])[0]) // (world.layout.tp * world.layout.pp)
    identity = identity_of(config, corpus)
    outer = OuterLoop(
        island.weights(),
        roles=Roles(**{role: build_role(config, role) for role in ROLES}),
        lane_group=meet(identity),
        island_group=island_group,
        identity=identity,
        publish=island.publish,
        gradients=island.gradients,
        device=None if config.outer_state_device is StateDevice.same else HOST,
    )
    resumer = Resumer(config, island_id, world, island, outer, corpus, identity)
    recorder = Recorder(config, island_id, world, island, outer, corpus)
    with recorder:
        resumer.resume()
        while outer.inner_steps < config.steps:
            step()
