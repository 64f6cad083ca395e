"""Bytes and memory, predicted, against what real islands send and allocate."""

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.activations import _norm, _tokens_bytes, kept_by_chunk
from dilocox.config import Config, Device, load_config
from dilocox.inside_traffic import predict_inside
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import World, start_world, stop_world
from dilocox.memory import estimates
from dilocox.method import build_roles
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.memory import Hub, MemoryLaneGroup, Turns, alone
from dilocox.parameters import FP32, chunks, flat_numel, holdings, total_parameters
from dilocox.topology import Lane
from dilocox.traffic import InsideMeter
from tests.distributed.ranks import run_ranks

VOCAB = 61
SMALL = [
    "device=cpu",
    "island.batch_size=8",
    "island.micro_batch_size=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.sequence_length=32",
    "model.vocab_multiple=64",
]
SINGLE = ["island=single"]
ONE_RANK = [
    SINGLE,
    [*SINGLE, "island.recompute=selective", "island.precision=bf16", "model.kv_heads=4"],
    [*SINGLE, "island.recompute=full"],
]
TWO_RANKS = [
    ["island=tp2"],
    ["island=tp2", "island.sequence_parallel=true", "island.recompute=full"],
    ["island=pp2", "island.precision=bf16"],
    ["island=pp2", "island.virtual_pp=2", "model.tied_embeddings=false"],
    ["island=dp2", "exchange=reduce_scatter", "codec=fp32"],
    ["island=dp2", "island.distributed_optimizer=true", "island.precision=bf16", "exchange=reduce_scatter"],
    ["island=dp2", "island.distributed_optimizer=true", "outer_optimizer=sgd"],
]
FOUR_RANKS = [
    ["island=tp2pp2", "island.sequence_parallel=true", "island.recompute=selective", "island.precision=bf16"],
    ["island=pp2", "island.dp=2", "island.distributed_optimizer=true"],
    ["island=dp2", "island.tp=2"],
]


def configure(overrides: list[str]) -> Config:
    return load_config([*overrides, *SMALL])


def build(config: Config, world: World) -> MegatronIsland:
    return MegatronIsland(
        world=world, model=config.model, island=config.island, inner=config.inner, vocab_size=VOCAB, seed=1
    )


def outer_loop(config: Config, island: MegatronIsland, world: World, lane_group: Any) -> OuterLoop:
    return OuterLoop(
        island.weights(),
        roles=build_roles(config),
        lane_group=lane_group,
        island_group=IslandGroup(world.group, world.device),
        identity={},
        kernels=config.kernels.value,
        publish=island.publish,
    )


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Allocated bytes by address, each storage once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def allocated(config: Config, island: MegatronIsland, loop: OuterLoop) -> dict[str, int]:
    parameters = [entry.parameter for entry in island._named]
    mains = [owned.main for owned in island._owned.values()]
    moments = [t for main in mains for t in island._optimiser.moments(main).values()]
    weights = storage_bytes(parameters)
    outer = [t for state in loop._states for t in (state.anchor, *state.slots.values())]
    outer += [
        t
        for state in loop._states
        for residual in state.residuals
        for t in (residual.committed, residual.pending)
        if t is not None
    ]
    inner = {address: size for address, size in storage_bytes([*mains, *moments]).items() if address not in weights}
    return {
        "weights": sum(weights.values()),
        "gradients": sum(storage_bytes(p.main_grad for p in parameters).values()),
        "inner_optimizer": sum(inner.values()),
        "outer_state": sum(storage_bytes(outer).values()),
    }


def saved_for_backward(island: MegatronIsland, tokens: Tensor) -> int:
    """Bytes that autograd keeps of one forward pass, besides parameters."""
    weights = storage_bytes(entry.parameter for entry in island._named)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with island.random.turn(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = island._forward_step(iter([tokens]), island._chunks[0])
    kept = sum(size for address, size in storage_bytes(saved).items() if address not in weights)
    del loss
    return kept


def measure(overrides: list[str]) -> dict[str, Any]:
    """Build one island of these ranks; what it allocates, and what it sends in a step and in a sync."""
    config = configure(overrides)
    world = start_world(config.island.layout, Device.cpu)
    try:
        island = build(config, world)
        loops = [
            outer_loop(config, island, world, MemoryLaneGroup(Hub(Turns(2)), island=index, lane="x"))
            for index in range(2)
        ]
        static = [allocated(config, island, loop) for loop in loops]
        tokens = torch.randint(0, VOCAB, (config.island.micro_batch_size, config.model.sequence_length + 1))
        kept = saved_for_backward(island, tokens) if world.layout.pp == 1 else None
        meter = InsideMeter()
        with meter:
            island.forward_backward([tokens] * config.island.microbatches)
            island.update()
            step = meter.bytes_sent
            loop = outer_loop(config, island, world, alone("x"))
            before = meter.bytes_sent
            loop._engine.complete(loop._engine.begin(0, [s.values for s in island.weights()], loop._progress, 1))
            island.publish()
        return {
            "lane": world.lane,
            "held": sorted((s.name, s.numel, s.replicas.size() if s.replicas else 1) for s in island.weights()),
            "flat": loop._states[0].fragment.numel,
            "names": [name for name, _ in _named(island)],
            "shapes": _named(island),
            "static": {part: max(found[part] for found in static) for part in static[0]},
            "kept": kept,
            "step": step,
            "sync": meter.bytes_sent - before,
        }
    finally:
        stop_world()


def _named(island: MegatronIsland) -> list[tuple[str, tuple[int, ...]]]:
    return [(entry.name, tuple(entry.parameter.shape)) for entry in island._named]


def measure_all(cases: list[list[str]]) -> list[dict[str, Any]]:
    """One world after another on the same ranks: each meets under keys of its own in their store."""
    start = dist.init_process_group
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    found = []
    for number, overrides in enumerate(cases):
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group = partial(start, store=dist.PrefixStore(str(number), store))
        found.append(measure(overrides))
    return found


def compare(overrides: list[str], found: dict[str, Any]) -> None:
    config, lane = configure(overrides), found["lane"]
    here = [parameter for chunk in chunks(config, VOCAB, lane) for parameter in chunk]
    assert sorted(found["shapes"]) == sorted((p.name, p.shape) for p in here)
    held = holdings(config, VOCAB, lane)
    assert found["held"] == sorted((h.name, h.numel, h.replicas) for h in held)
    assert found["flat"] == flat_numel(held, build_roles(config).codec.alignment)
    needed = estimates(config, VOCAB)[lane]
    assert found["static"] == {part: getattr(needed, part) for part in found["static"]}
    if found["kept"] is not None:
        labels_and_angles = 4096
        assert found["kept"] == pytest.approx(predicted_kept(config, lane), rel=0, abs=labels_and_angles)
    predicted = predict_inside(config, VOCAB, lane)
    few_numbers = 1024
    assert predicted.per_step <= found["step"] <= predicted.per_step + few_numbers
    assert abs(predicted.per_sync - found["sync"]) <= few_numbers


def predicted_kept(config: Config, lane: Lane) -> int:
    """What one forward pass keeps: layers, the last norm, and of the logits their fp32 softmax."""
    final_norm = _tokens_bytes(config, _norm(config))
    softmax = _tokens_bytes(config, config.model.padded_vocab(VOCAB) / config.island.tp * FP32)
    return kept_by_chunk(config) + final_norm + softmax


@pytest.mark.parametrize(("ranks", "cases"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)])
def test_predictions_equal_real_islands(ranks: int, cases: list[list[str]]) -> None:
    for results in run_ranks(ranks, measure_all, cases):
        for overrides, found in zip(cases, results, strict=True):
            compare(overrides, found)


def test_one_lane_holds_the_whole_model() -> None:
    config = configure(SINGLE)
    (only,) = config.island.layout.lanes()
    assert sum(h.numel for h in holdings(config, VOCAB, only)) == total_parameters(config.model, VOCAB)
