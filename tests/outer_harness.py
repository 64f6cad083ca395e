"""Outer loops over small tensors, islands in turns: the real loop, engine and exchanges without a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox.launchers.inprocess import run_in_turns
from dilocox.outer.codecs.block import Block
from dilocox.outer.codecs.cast import Cast
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.optimisers.sgd import SGD, Nesterov
from dilocox.outer.participation import All
from dilocox.outer.roles import Roles
from dilocox.outer.schedule import EveryH
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.shards import whole_shard

FP32 = Cast(dtype="fp32", error_feedback=False, residual_decay=1.0, residual_dtype="fp32")
_BLOCK: dict[str, Any] = {
    "block_size": 32,
    "scale_dtype": "fp16",
    "rounding": "nearest",
    "error_feedback": True,
    "residual_decay": 1.0,
    "residual_dtype": "fp32",
    "seed": 0,
}
INT4 = Block(format="int4", **_BLOCK)
INT8 = Block(format="int8", **_BLOCK)
NESTEROV = Nesterov(lr=0.7, momentum=0.9)


def roles(**choices: Any) -> Roles:
    """DiLoCo with H=1 on fp32, and what a test changes of it."""
    base = Roles(
        schedule=EveryH(inner_steps=1),
        participation=All(timeout_s=10, attempts=1),
        codec=FP32,
        outer_optimizer=SGD(lr=1.0),
    )
    return replace(base, **choices)


def outer_loop(weights: Sequence[Tensor], chosen: Roles, lane_group: LaneGroup, **options: Any) -> OuterLoop:
    return OuterLoop(
        [whole_shard(f"p{index}", tensor) for index, tensor in enumerate(weights)],
        roles=chosen,
        lane_group=lane_group,
        island_group=IslandGroup(None, torch.device("cpu")),
        identity={"test": 1},
        kernels="auto",
        **options,
    )


def run_islands(islands: int, body: Callable[[int, LaneGroup], Any]) -> list[Any]:
    """Run `body` on each island in turns; returns what each returned."""
    results: list[Any] = [None] * islands

    def one(island: int, group: LaneGroup) -> None:
        results[island] = body(island, group)

    run_in_turns(islands, "lane", one)
    return results


def drift(weights: Sequence[Tensor], island: int, step: int, scale: float = 0.01) -> None:
    """An inner step that differs by island and step: adds seeded noise in place."""
    generator = torch.Generator().manual_seed(1000 * island + step)
    for tensor in weights:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)


def start_weights(sizes: Sequence[int] = (70, 33, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator) for size in sizes]


def step(loop: OuterLoop, weights: Sequence[Tensor], island: int, inner_step: int, tokens: int = 1) -> list[Any]:
    progress = Progress(tokens=tokens, steps=1, documents=island + 1)
    reports = loop.after_backward(progress)
    drift(weights, island, inner_step)
    return reports + loop.after_update(progress)
