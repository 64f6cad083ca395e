"""Real pseudo-gradients: the main job's tiny model, two islands in one process, anchor − local after every round."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dilocox.config import Config, load_config
from dilocox.data.corpus import Corpus, open_corpus
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import start_world, stop_world
from dilocox.launchers.inprocess import run_in_turns
from dilocox.method import build_roles
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.protocol import LaneGroup

ISLANDS = 2
INNER_STEPS = 25
SETTINGS = (
    "algo=diloco",
    "island=single",
    "launcher=inprocess",
    f"islands={ISLANDS}",
    f"schedule.inner_steps={INNER_STEPS}",
    "island.batch_size=4",
    "island.micro_batch_size=4",
)


def record(rounds: int) -> list[Tensor]:
    """The pseudo-gradients of island 0 in the first rounds, each fp32 [parameters], in a process of its own.

    All lengths of the model's tensors are multiples of 64, so that blocks cross no tensor here either.
    """
    config = load_config([*SETTINGS, f"steps={rounds * INNER_STEPS}"])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [torch.from_numpy(delta) for delta in pool.submit(_record, config, rounds).result()]


def _record(config: Config, rounds: int) -> list[np.ndarray]:
    torch.set_num_threads(1)
    world = start_world(config.island.layout, config.device)
    deltas: list[np.ndarray] = []

    def body(index: int, lane_group: LaneGroup) -> None:
        corpus = _corpus(config, index)
        island = MegatronIsland(
            model=config.model,
            island=config.island,
            inner=config.inner,
            vocab_size=corpus.tokenizer.vocab_size,
            seed=config.seed,
            world=world,
        )
        outer = OuterLoop(
            island.weights(),
            roles=build_roles(config),
            lane_group=lane_group,
            island_group=IslandGroup(None, torch.device("cpu")),
            identity={},
            kernels=config.kernels.value,
            publish=island.publish,
        )
        for _ in range(rounds):
            anchor = _flat(island)  # a sync has overwritten the local weights with it
            for step in range(1, INNER_STEPS + 1):
                island.forward_backward([corpus.train.next_microbatch()])
                island.update()
                if index == 0 and step == INNER_STEPS:
                    deltas.append((anchor - _flat(island)).numpy())
                outer.after_update(Progress(steps=1))

    run_in_turns(ISLANDS, "pseudo-gradients", body)
    stop_world()
    return deltas


def _corpus(config: Config, island: int) -> Corpus:
    return open_corpus(
        config.data,
        islands=ISLANDS,
        island=island,
        dp=1,
        dp_rank=0,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        micro_batch_size=config.island.micro_batch_size,
        batch_size=config.island.batch_size,
    )


def _flat(island: MegatronIsland) -> Tensor:
    return torch.cat([shard.values.detach().flatten().cpu() for shard in island.weights()])
