"""Tiny islands for tests: configurations, training on real ranks, and a whole model gathered by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilocox.config import (
    AdamImplementation,
    Decay,
    Device,
    InnerConfig,
    InnerOptimizer,
    IslandConfig,
    ModelConfig,
    Precision,
    Recompute,
)
from dilocox.shards import Box, Shard
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:  # at run time only ranks import Megatron: it takes seconds, and patches torch where CUDA is absent
    from dilocox.islands.megatron import MegatronIsland
    from dilocox.islands.world import World

VOCAB = 61
SEED = 7
STEPS = 5

MODEL = ModelConfig(
    name="test",
    layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    heads=4,
    kv_heads=2,
    sequence_length=32,
    max_position=32,
    tied_embeddings=True,
    rope_base=10000,
    norm_epsilon=1e-5,
    init_std=0.02,
    vocab_multiple=64,
)
ISLAND = IslandConfig(
    tp=1,
    pp=1,
    virtual_pp=1,
    dp=1,
    batch_size=8,
    micro_batch_size=2,
    precision=Precision.fp32,
    sequence_parallel=False,
    recompute=Recompute.none,
    distributed_optimizer=False,
)
INNER = InnerConfig(
    optimizer=InnerOptimizer.adamw,
    implementation=AdamImplementation.auto,
    lr=1e-3,
    min_lr_ratio=0.1,
    warmup_steps=2,
    decay=Decay.cosine,
    decay_steps=20,
    betas=(0.9, 0.95),
    epsilon=1e-8,
    weight_decay=0.1,
    clip_grad=1.0,
)


@dataclass(frozen=True)
class Setting:
    """What an island is built from."""

    model: ModelConfig
    island: IslandConfig
    inner: InnerConfig

    def build(self, world: "World") -> "MegatronIsland":
        from dilocox.islands.megatron import MegatronIsland

        return MegatronIsland(
            world, model=self.model, island=self.island, inner=self.inner, vocab_size=VOCAB, seed=SEED
        )

    def batches(self, dp_rank: int, step: int) -> list[Tensor]:
        """The microbatches of one dp rank: at every layout the island sees the same sequences in a step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (self.island.batch_size, MODEL.sequence_length + 1), generator=generator)
        return list(tokens.chunk(self.island.dp)[dp_rank].split(self.island.micro_batch_size))


def setting(**changes: Any) -> Setting:
    """The tiny setting with changes to fields of model, island or inner, told apart by their names."""
    model, island, inner = (
        {key: change for key, change in changes.items() if hasattr(base, key)} for base in (MODEL, ISLAND, INNER)
    )
    assert len(model) + len(island) + len(inner) == len(changes), f"unknown or ambiguous among {sorted(changes)}"
    return Setting(replace(MODEL, **model), replace(ISLAND, **island), replace(INNER, **inner))


class Piece(NamedTuple):
    """A shard as plain data that a process can send: copied values, and how many ranks hold them."""

    name: str
    box: Box
    start: int
    stop: int
    values: Tensor
    replicas: int


def pieces(shards: Iterable[Shard]) -> list[Piece]:
    return [
        Piece(s.name, s.box, s.start, s.stop, s.values.clone(), s.replicas.size() if s.replicas else 1) for s in shards
    ]


def assemble(ranks: Iterable[list[Piece]]) -> dict[str, Tensor]:
    """The whole model by name from all ranks' pieces. Asserts that they are fp32, that each element is there once
    after dividing by its replicas, and that replicas are equal."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, box, start, stop, values, replicas in (piece for rank in ranks for piece in rank):
        assert values.dtype is torch.float32, f"{name} is {values.dtype}"
        full = whole.setdefault(name, torch.full(box.global_shape, torch.nan))
        count = times.setdefault(name, torch.zeros(box.global_shape, dtype=torch.float64))
        for flat, part in box.rectangles(start, stop):
            index = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            new = values[flat - start :][: part.numel].view(part.shape)
            old = full[index]
            assert bool((old.isnan() | (old == new)).all()), f"replicas of {name} differ"
            full[index] = new
            count[index] += 1 / replicas
    for name, count in times.items():
        assert torch.allclose(count, torch.ones_like(count)), f"{name} is not held exactly once"
    return whole


@dataclass(frozen=True)
class Trace:
    """What one rank saw of a training run."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    initial: list[Piece]
    gradients: list[Piece]
    """Of the first step."""
    weights: list[Piece]
    moments: dict[str, list[Piece]]
    moments_before: dict[str, list[Piece]]
    """Before the first step."""
    restored_loss: float
    """Of the first step's batches, after the initial weights were written back and published."""
    optimizer: str


@dataclass(frozen=True)
class Run:
    """A training run of one island: whole tensors by name, and what all its ranks agree on."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    moments_before: dict[str, dict[str, Tensor]]
    restored_loss: float
    optimizer: str

    @staticmethod
    def of(traces: Sequence[Trace]) -> "Run":
        first = traces[0]
        for trace in traces:
            assert (trace.losses, trace.norms, trace.rates) == (first.losses, first.norms, first.rates)
            assert (trace.restored_loss, trace.optimizer) == (first.restored_loss, first.optimizer)
        return Run(
            losses=first.losses,
            norms=first.norms,
            rates=first.rates,
            initial=assemble(trace.initial for trace in traces),
            gradients=assemble(trace.gradients for trace in traces),
            weights=assemble(trace.weights for trace in traces),
            moments={kind: assemble(trace.moments[kind] for trace in traces) for kind in first.moments},
            moments_before={
                kind: assemble(trace.moments_before[kind] for trace in traces) for kind in first.moments_before
            },
            restored_loss=first.restored_loss,
            optimizer=first.optimizer,
        )


def train_settings(*settings: Setting) -> list[Run]:
    """Train one island after the other on the ranks of one world; all settings share tp, pp and dp."""
    layout = settings[0].island.layout
    assert all(one.island.layout == layout for one in settings)
    ranks = run_ranks(layout.world_size, _train_on_rank, settings)
    return [Run.of(traces) for traces in zip(*ranks, strict=True)]


def _train_on_rank(settings: Sequence[Setting]) -> list[Trace]:
    from dilocox.islands.world import start_world, stop_world

    world = start_world(settings[0].island.layout, Device.auto)
    traces = [trace_of(one, one.build(world)) for one in settings]
    stop_world()
    return traces


def trace_of(one: Setting, island: "MegatronIsland") -> Trace:
    initial = pieces(island.weights())
    moments_before = {kind: pieces(shards) for kind, shards in island.optimizer_state().items()}
    losses, norms, rates, gradients = [], [], [], []
    for step in range(STEPS):
        losses.append(island.forward_backward(one.batches(island.lane.dp, step)))
        if step == 0:
            gradients = pieces(island.gradients())
        rates.append(island.learning_rate)
        norms.append(island.update())
    weights = pieces(island.weights())
    moments = {kind: pieces(shards) for kind, shards in island.optimizer_state().items()}
    for shard, piece in zip(island.weights(), initial, strict=True):
        shard.values.copy_(piece.values)
    island.publish()
    return Trace(
        losses=losses,
        norms=norms,
        rates=rates,
        initial=initial,
        gradients=gradients,
        weights=weights,
        moments=moments,
        moments_before=moments_before,
        restored_loss=island.evaluate(one.batches(island.lane.dp, 0)),
        optimizer=island.inner_optimizer_name,
    )


def relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest over names of ‖one − other‖ / ‖other‖."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)
