"""Tiny islands for tests: configurations, a started world, and a whole model gathered by name."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox.config import (
    AdamImplementation,
    Decay,
    InnerConfig,
    InnerOptimizer,
    IslandConfig,
    ModelConfig,
    Precision,
    Recompute,
)

VOCAB = 61

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


def model(**changes: Any) -> ModelConfig:
    return replace(MODEL, **changes)


def island(**changes: Any) -> IslandConfig:
    return replace(ISLAND, **changes)


def inner(**changes: Any) -> InnerConfig:
    return replace(INNER, **changes)


def batches(config: IslandConfig, dp_rank: int, step: int) -> list[Tensor]:
    """The microbatches of one dp rank: at every layout the island sees the same sequences in a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (config.batch_size, MODEL.sequence_length + 1), generator=generator)
    return list(tokens.chunk(config.dp)[dp_rank].split(config.micro_batch_size))


def pieces(shards: Iterable[Any]) -> list[tuple[str, Any, int, int, Tensor, int]]:
    """Shards as plain data that a process can send: (name, box, start, stop, copied values, number of replicas)."""
    return [
        (s.name, s.box, s.start, s.stop, s.values.float().clone(), s.replicas.size() if s.replicas else 1)
        for s in shards
    ]


def assemble(ranks: Iterable[list[tuple[str, Any, int, int, Tensor, int]]]) -> dict[str, Tensor]:
    """The whole model by name from all ranks' `pieces`; each element must come once after dividing by replicas, and
    replicas must be equal."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, box, start, stop, values, replicas in (piece for rank in ranks for piece in rank):
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
