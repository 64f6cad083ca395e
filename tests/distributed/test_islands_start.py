"""How an island starts, and what it refuses to start with."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dilocox.config import AdamImplementation, Device, InnerOptimizer, Precision
from dilocox.errors import ConfigError
from dilocox.topology import Lane, Layout
from tests.distributed.islands import setting
from tests.distributed.ranks import run_ranks

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_one_rank() -> None:
    run_ranks(1, _one_rank)


def _one_rank() -> None:
    _refused_worlds()
    with patch.dict(os.environ):
        for name in ENVIRONMENT:
            del os.environ[name]
        _islands_without_a_launcher()


def _refused_worlds() -> None:
    from dilocox.islands.world import start_world

    with pytest.raises(ConfigError, match=r"WORLD_SIZE=1: .* tp=2, pp=3, dp=1 needs 6 ranks.*Start 6 ranks"):
        start_world(Layout(tp=2, pp=3, dp=1), Device.auto)
    with patch.dict(os.environ):
        del os.environ["MASTER_PORT"]
        with pytest.raises(ConfigError, match=r"MASTER_PORT=None: is not set.*torchrun"):
            start_world(Layout(tp=1, pp=1, dp=1), Device.auto)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device='cuda': torch finds no CUDA device.*device=auto"):
            start_world(Layout(tp=1, pp=1, dp=1), Device.cuda)
    assert not dist.is_initialized(), "a refusal comes before any process group"


def _islands_without_a_launcher() -> None:
    from dilocox.islands.world import start_world, stop_world

    world = start_world(Layout(tp=1, pp=1, dp=1), Device.auto)
    assert (world.group, world.lane) == (None, Lane(0, 0, 0))
    island = setting().build(world)
    on_gpu = world.device.type == "cuda"
    assert on_gpu or island.inner_optimizer_name == f"torch {torch.__version__} AdamW (fused)"
    assert setting(precision=Precision.auto).build(world).precision is (Precision.bf16 if on_gpu else Precision.fp32)
    assert "SGD" in setting(optimizer=InnerOptimizer.sgd).build(world).inner_optimizer_name
    if not on_gpu:
        for implementation in (AdamImplementation.apex, AdamImplementation.transformer_engine):
            with pytest.raises(ConfigError, match=f"{implementation.value}.*runs on GPUs only"):
                setting(implementation=implementation).build(world)
    with pytest.raises(ValueError, match="microbatches of one shape"):
        island.forward_backward([])
    batches = setting().batches(0, 0)
    with pytest.raises(ValueError, match="microbatches of one shape"):
        island.forward_backward([*batches, batches[0][:1]])
    stop_world()
    assert not dist.is_initialized()


def test_two_ranks() -> None:
    run_ranks(2, _two_ranks)


def _two_ranks() -> None:
    from dilocox.islands.world import start_world

    one = setting(pp=2, virtual_pp=2)
    world = start_world(one.island.layout, Device.auto)
    assert world.lane == Lane(tp=0, pp=int(os.environ["RANK"]), dp=0)
    assert world.group is not None
    assert world.group.size() == 2
    island = one.build(world)
    with pytest.raises(ConfigError, match=r"microbatches=3: .*multiples of pp=2.*island.virtual_pp=1"):
        island.evaluate(one.batches(0, 0)[:3])
    assert island.evaluate(one.batches(0, 0)) == island.evaluate(one.batches(0, 0))
    tied = [shard for shard in island.weights() if shard.replicas is not None]
    assert [shard.name for shard in tied] == ["embedding.word_embeddings.weight"]
