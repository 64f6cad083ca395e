"""The outer loop as a library: a plain module, DistributedDataParallel and FSDP2, without Megatron or Hydra."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilocox.outer.apply import Overwrite
from dilocox.outer.codecs.block import Block
from dilocox.outer.codecs.cast import Cast
from dilocox.outer.job import Progress
from dilocox.outer.modules import attach
from dilocox.outer.optimisers.sgd import SGD, Nesterov
from dilocox.outer.participation import All
from dilocox.outer.roles import Roles
from dilocox.outer.schedule import EveryH
from tests.distributed.ranks import run_ranks

STEPS, INNER_STEPS = 6, 2


def roles(codec: Any) -> Roles:
    return Roles(
        schedule=EveryH(inner_steps=INNER_STEPS),
        participation=All(timeout_s=60, attempts=1),
        codec=codec,
        outer_optimizer=Nesterov(lr=0.7, momentum=0.9),
        apply=Overwrite(),
    )


FP32 = Cast(dtype="fp32", error_feedback=False, residual_decay=1.0, residual_dtype="fp32")
INT4 = Block(
    format="int4",
    block_size=32,
    scale_dtype="fp16",
    rounding="nearest",
    error_feedback=True,
    residual_decay=1.0,
    residual_dtype="fp32",
    seed=0,
)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7, bias=False), nn.LayerNorm(7))


def inner_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """An epsilon that keeps gradients near zero from turning roundings into steps of full length."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def batch(island: int, step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * island + step))


def train(module: nn.Module, island: int, islands: int, chosen: Roles, rank: int, ranks: int) -> None:
    """An ordinary training loop with the outer loop added; each rank takes its part of the island's batch."""
    optimizer = inner_optimizer(module)
    outer = attach(
        module,
        rendezvous=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        island=island,
        islands=islands,
        roles=chosen,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(island, step).chunk(ranks)[rank]).square().mean().backward()
        outer.after_backward(Progress(steps=1))
        optimizer.step()
        outer.after_update(Progress(steps=1))
    outer.check_end()
    outer.close()


def _plain_rank(codec: Any) -> dict[str, Tensor]:
    island, islands = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = model()
    train(module, island, islands, roles(codec), 0, 1)
    assert "megatron" not in sys.modules
    assert "hydra" not in sys.modules
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _wrapped_rank(kind: str, codec: Any) -> dict[str, Tensor]:
    """Four processes: two islands of two ranks."""
    rank = int(os.environ["RANK"])
    island, inside = divmod(rank, 2)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore(f"world{island}", store), rank=inside, world_size=2)
    module: nn.Module = model()
    if kind == "ddp":
        module = DistributedDataParallel(module)
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in module.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    train(module, island, 2, roles(codec), inside, 2)
    inner = module.module if kind == "ddp" else module
    whole = {}
    for name, parameter in inner.named_parameters():
        full = parameter.full_tensor() if kind == "fsdp2" else parameter
        whole[name] = full.detach().clone()
    dist.destroy_process_group()
    return whole


def reference() -> dict[str, Tensor]:
    """DiLoCo on two islands in plain torch: AdamW inside, torch's own Nesterov SGD outside."""
    anchor = model()
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    locals_ = [model() for _ in range(2)]
    inner = [inner_optimizer(module) for module in locals_]
    for step in range(STEPS):
        for island, (module, optimizer) in enumerate(zip(locals_, inner, strict=True)):
            optimizer.zero_grad()
            module(batch(island, step)).square().mean().backward()
            optimizer.step()
        if (step + 1) % INNER_STEPS:
            continue
        for parameters in zip(anchor.parameters(), *(m.parameters() for m in locals_), strict=True):
            parameters[0].grad = torch.stack([parameters[0].detach() - p.detach() for p in parameters[1:]]).mean(0)
        outer.step()
        for module in locals_:
            module.load_state_dict(anchor.state_dict())
    return {name: parameter.detach() for name, parameter in anchor.named_parameters()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance)


def assert_equal(results: list[dict[str, Tensor]]) -> None:
    assert all(torch.equal(other[name], results[0][name]) for other in results for name in results[0])


def test_a_plain_module() -> None:
    exact = run_ranks(2, _plain_rank, FP32)
    assert_equal(exact)
    assert_close(exact[0], reference(), 1e-6)
    coarse = run_ranks(2, _plain_rank, INT4)
    assert_equal(coarse)
    assert_close(coarse[0], reference(), 0.05)


def test_distributed_data_parallel() -> None:
    exact = run_ranks(4, _wrapped_rank, "ddp", FP32)
    assert_equal(exact)
    assert_close(exact[0], reference(), 1e-5)
    assert_equal(run_ranks(4, _wrapped_rank, "ddp", INT4))


def test_fsdp2() -> None:
    exact = run_ranks(4, _wrapped_rank, "fsdp2", FP32)
    assert_equal(exact)
    assert_close(exact[0], reference(), 1e-5)
    assert_equal(run_ranks(4, _wrapped_rank, "fsdp2", INT4))


def test_one_island_at_outer_lr_one_is_plain_training() -> None:
    """K=1, H=1, SGD lr 1: θ − (θ − θ_k) differs from θ_k by one rounding."""

    def run(with_outer: bool) -> list[Tensor]:
        module = model()
        optimizer = inner_optimizer(module)
        chosen = Roles(
            schedule=EveryH(inner_steps=1),
            participation=All(timeout_s=60, attempts=1),
            codec=FP32,
            outer_optimizer=SGD(lr=1.0),
        )
        outer = attach(module, rendezvous=None, island=0, islands=1, roles=chosen)
        for step in range(50):
            optimizer.zero_grad()
            module(batch(0, step)).square().mean().backward()
            optimizer.step()
            if with_outer:
                outer.after_update(Progress(steps=1))
        return [parameter.detach() for parameter in module.parameters()]

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
