"""The meter of bytes inside an island, on real ranks, against values computed by hand."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.traffic import InsideMeter
from tests.distributed.ranks import run_ranks


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)  # sum() hands out one element, expanded
        dist.all_reduce(summed)
        return summed


def collectives() -> list[tuple[str, int]]:
    """Each collective with 1200 fp32 elements a rank, over three ranks: (name, bytes counted here)."""
    dist.init_process_group("gloo")
    rank, counted = dist.get_rank(), []
    own, three = torch.ones(1200), torch.ones(3600)
    parts = list(three.chunk(3))
    alias = dist.all_gather_into_tensor
    meter = InsideMeter()
    meter.install()

    def count(name: str, action: Any) -> None:
        before = meter.bytes_sent
        action()
        counted.append((name, meter.bytes_sent - before))

    count("all_reduce", lambda: dist.all_reduce(own))
    count("broadcast", lambda: dist.broadcast(own, src=0))
    count("reduce", lambda: dist.reduce(own, dst=1))
    count("all_gather", lambda: dist.all_gather(parts, own))
    count("all_gather_into_tensor", lambda: alias(three, own))
    count("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(own, three))
    count("all_to_all_single", lambda: dist.all_to_all_single(torch.empty(3600), three))
    count("gather", lambda: dist.gather(own, parts if rank == 0 else None, dst=0))
    count("scatter", lambda: dist.scatter(own, parts if rank == 0 else None, src=0))
    count("ring", lambda: pass_on(own, rank))
    count("barrier", dist.barrier)
    meter.current = 1
    count("thread", lambda: in_thread(lambda: dist.all_reduce(own)))
    count("backward", lambda: _SumOverRanks.apply(own.clone().requires_grad_()).sum().backward())
    meter.current = 0
    count("turn of another island", lambda: None)
    meter.remove()
    count("removed", lambda: dist.all_reduce(own))
    dist.destroy_process_group()
    return counted


def pass_on(values: Tensor, rank: int) -> None:
    arriving = torch.empty_like(values)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values, (rank + 1) % 3), dist.P2POp(dist.irecv, arriving, (rank - 1) % 3)]
    )
    for request in requests:
        request.wait()


def in_thread(action: Any) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_meter_counts_every_collective_by_its_ring_formula() -> None:
    own = 4 * 1200
    expected = [
        ("all_reduce", 2 * 2 * own // 3),
        ("broadcast", 2 * own // 3),
        ("reduce", 2 * own // 3),
        ("all_gather", 2 * own),
        ("all_gather_into_tensor", 2 * own),
        ("reduce_scatter_tensor", 2 * own),
        ("all_to_all_single", 2 * own),
        ("gather", 2 * own // 3),
        ("scatter", 2 * own // 3),
        ("ring", own),
        ("barrier", 0),
        ("thread", 2 * 2 * own // 3),
        ("backward", 2 * 2 * own // 3),
        ("turn of another island", 0),
        ("removed", 0),
    ]
    assert run_ranks(3, collectives) == [expected] * 3


def test_meter_is_installed_once() -> None:
    with InsideMeter() as meter, pytest.raises(RuntimeError, match="installed already"):
        meter.install()
