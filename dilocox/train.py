"""The whole training loop on one page: build the island and the outer loop; step, sync, evaluate, checkpoint.

One call of `train` is one rank of one island. Launchers decide which processes or threads call it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dilocox.config import Config, StateDevice
from dilocox.data.corpus import open_corpus
from dilocox.errors import NonFiniteError
from dilocox.identity import identity_of
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import World
from dilocox.method import build_roles
from dilocox.observe.recorder import Recorder
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.reporter import Reporter
from dilocox.resume import Resumable, find
from dilocox.topology import Lane
from dilocox.traffic import InsideMeter

Meet = Callable[[Mapping[str, object]], LaneGroup]
"""Connects this lane with the same lane of the other islands, once all have shown the same identity."""


def train(
    config: Config, island_id: int, world: World, meet: Meet, meter: InsideMeter, begin: Callable[[], None]
) -> None:
    """Train island `island_id` on this rank, from the start or from a checkpoint, to `config.steps` inner steps.

    All ranks of all islands run it. `begin` is called when all is checked and loaded, before anything is recorded.
    Raises a DilocoxError that says what went wrong and what to do; whatever was checkpointed before is then untouched.
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
        model=config.model,
        island=config.island,
        inner=config.inner,
        vocab_size=corpus.tokenizer.vocab_size,
        seed=config.seed,
        world=world,
    )
    island_group = IslandGroup(world.group, world.device)
    documents = island_group.sum([corpus.documents])[0] / (world.layout.tp * world.layout.pp)
    progress = Progress(
        tokens=config.island.batch_size * config.model.sequence_length, steps=1, documents=int(documents)
    )
    outer_device = world.device if config.outer_state_device is StateDevice.same else torch.device("cpu")
    identity = identity_of(config, corpus, outer_device)
    lane_group = meet(identity)
    outer = OuterLoop(
        island.weights(),
        roles=build_roles(config),
        lane_group=lane_group,
        island_group=island_group,
        identity=identity,
        kernels=config.kernels.value,
        publish=island.publish,
        gradients=island.gradients,
        device=outer_device,
    )
    resumable = Resumable(config, island_id, island, outer, corpus, identity)
    heldout = corpus.heldout(config.evaluation.batches)

    with Recorder(config, island_id, leader=world.lane == Lane(0, 0, 0)) as recorder:
        report = Reporter(recorder, config, world, island, outer, lane_group, meter)
        found = find(config, island_id, world.group, lane_group)
        if found is not None:
            resumable.load(found)
        begin()
        report.start(corpus.tokenizer.vocab_size)
        if config.resume != "never":
            report.resumed(found)
        if found is None:
            report.evaluation(evaluate(island, outer, heldout))
        evaluations = Every(config.evaluation.every_steps, outer.inner_steps)
        checkpoints = Every(config.checkpoint.every_steps, outer.inner_steps)

        while outer.inner_steps < config.steps:
            started, learning_rate = lane_group.clock(), island.learning_rate
            loss = island.forward_backward(corpus.train.next_microbatch() for _ in range(config.island.microbatches))
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"island {island_id}, inner step {outer.inner_steps + 1}: the loss is {loss}; no other island has "
                    "taken it up. Resume from the last checkpoint with a lower inner.lr, or look at this step's data"
                )
            syncs = outer.after_backward(progress)
            gradient_norm = island.update()
            syncs += outer.after_update(progress)
            report.step(loss, gradient_norm, learning_rate, lane_group.clock() - started, syncs)

            if outer.at_round_end:
                last = outer.inner_steps == config.steps
                if evaluations.due(outer.inner_steps) or last:
                    report.evaluation(evaluate(island, outer, heldout))
                if checkpoints.due(outer.inner_steps) or (last and config.checkpoint.every_steps):
                    report.checkpoint(resumable.save)
        outer.check_end()
        report.end()
        lane_group.close()


def evaluate(island: MegatronIsland, outer: OuterLoop, heldout: Sequence[Tensor]) -> float:
    """The held-out loss of the anchor, in nats a token; collective over the island."""
    with outer.anchor_weights():
        return island.evaluate(heldout)


class Every:
    """Whether `every` more steps have passed, asked at round ends; 0 is never."""

    def __init__(self, every: int, done: int) -> None:
        self._every = every
        self._passed = done // every if every else 0

    def due(self, step: int) -> bool:
        before, self._passed = self._passed, step // self._every if self._every else 0
        return self._passed > before
