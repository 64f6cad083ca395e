"""Megatron islands through checkpoints: a resumed one goes on bit for bit, and one rank can read what two saved."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dilocox import checkpoint
from dilocox.config import Device, Precision
from dilocox.shards import Shard, whole_shard
from tests.distributed.islands import Piece, Setting, assemble, pieces, setting
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from dilocox.islands.megatron import MegatronIsland

SETTINGS = {
    "tp2": setting(tp=2),
    "pp2, tied embeddings at both ends": setting(pp=2),
    "dp2, distributed optimizer, bf16": setting(dp=2, distributed_optimizer=True, precision=Precision.bf16),
}


def everything(island: "MegatronIsland") -> dict[str, list[Shard]]:
    return {"weights": island.weights(), **island.optimizer_state()}


def go_on(one: Setting, island: "MegatronIsland", steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(island.forward_backward(one.batches(island.lane.dp, step)))
        island.update()
    return losses


def unbroken_and_resumed(one: Setting, folder: Path) -> tuple[list[Piece], list[Piece], bool]:
    """One rank's part: weights when saved and at the end, and whether a resumed island ended with the same bits."""
    from dilocox.islands.world import start_world, stop_world

    world = start_world(one.island.layout, Device.auto)
    unbroken = one.build(world)
    go_on(one, unbroken, range(3))
    saved = pieces(unbroken.weights())
    path = checkpoint.save(
        folder,
        step=3,
        shards=everything(unbroken),
        rank_tensors=unbroken.random.state(),
        state=unbroken.state(),
        about={"island": 0},
        group=world.group,
        keep_last=2,
    )
    losses = go_on(one, unbroken, range(3, 6))

    resumed = one.build(world)
    state, random = checkpoint.load(path, shards=everything(resumed), group=world.group, expected={"island": 0})
    resumed.load_state(state)
    resumed.random.load_state(random)
    resumed.publish()
    same = go_on(one, resumed, range(3, 6)) == losses and all(
        torch.equal(a.values, b.values)
        for kind in everything(unbroken)
        for a, b in zip(everything(unbroken)[kind], everything(resumed)[kind], strict=True)
    )
    stop_world()
    return saved, pieces(unbroken.weights()), same


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_island_equals_an_unbroken_one_and_one_rank_reads_its_weights(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, unbroken_and_resumed, SETTINGS[name], tmp_path)
    assert all(same for _, _, same in ranks)
    saved, ended = (assemble(rank[i] for rank in ranks) for i in (0, 1))
    assert any(not torch.equal(saved[parameter], ended[parameter]) for parameter in saved)

    alone = {parameter: torch.zeros_like(tensor) for parameter, tensor in saved.items()}
    read(checkpoint.step_folder(tmp_path, 3), alone)
    assert all(torch.equal(alone[parameter], saved[parameter]) for parameter in saved)


def read(path: Path, weights: dict[str, Tensor]) -> None:
    shards = {"weights": [whole_shard(parameter, tensor) for parameter, tensor in weights.items()]}
    checkpoint.load_tensors(path, shards=shards, group=None)
