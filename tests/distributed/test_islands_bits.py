"""What must not change a single bit: evaluation, a resumed run, another island in the same process, recomputation."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dilocox.config import Device, InnerOptimizer, Precision, Recompute
from tests.distributed.islands import Setting, setting
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from dilocox.islands.megatron import MegatronIsland
    from dilocox.islands.world import World

STEPS = 4
OTHER = 100  # where the batches of another island start

ONE_RANK = [
    setting(precision=Precision.bf16, micro_batch_size=4),
    setting(optimizer=InnerOptimizer.sgd, betas=(0.9, 0.0), lr=0.1, micro_batch_size=4),
]
TWO_RANKS = [
    setting(dp=2, distributed_optimizer=True),
    setting(dp=2, distributed_optimizer=True, precision=Precision.bf16),
]
Snapshot = tuple[list[float], list[Tensor]]


def test_one_rank() -> None:
    alone = run_ranks(1, _other_alone, ONE_RANK)[0]
    run_ranks(1, _check_all, ONE_RANK, [alone])


def test_two_ranks_with_a_distributed_optimizer() -> None:
    run_ranks(2, _check_all, TWO_RANKS, run_ranks(2, _other_alone, TWO_RANKS))


def _check_all(settings: Sequence[Setting], alone: list[list[Snapshot]]) -> None:
    world = _start(settings)
    for index, one in enumerate(settings):
        expected = _train(one, one.build(world), 0, STEPS)
        _same(expected, _train(one, one.build(world), 0, STEPS), "a second run")
        _same(expected, _train_and_evaluate(one, one.build(world)), "evaluation between the steps")
        _same(expected, _resumed(one, world), "a resumed run")
        first, other = _in_turns(one, world)
        _same(expected, first, "another island in the same process")
        _same(alone[world.lane.dp][index], other, "an island in a process of its own")
        assert expected[0] != other[0]


def _other_alone(settings: Sequence[Setting]) -> list[Snapshot]:
    world = _start(settings)
    return [_train(one, one.build(world), OTHER, STEPS) for one in settings]


def _start(settings: Sequence[Setting]) -> "World":
    from dilocox.islands.world import start_world

    return start_world(settings[0].island.layout, Device.auto)


def _train(one: Setting, island: "MegatronIsland", first: int, steps: int) -> Snapshot:
    losses = []
    for step in range(first, first + steps):
        losses.append(island.forward_backward(one.batches(island.lane.dp, step)))
        island.update()
    return losses, _state(island)


def _state(island: "MegatronIsland") -> list[Tensor]:
    shards = [island.weights(), *island.optimizer_state().values()]
    return [shard.values.clone() for kind in shards for shard in kind]


def _same(expected: Snapshot, found: Snapshot, what: str) -> None:
    assert found[0] == expected[0], f"{what} changes the losses"
    assert all(map(torch.equal, found[1], expected[1])), f"{what} changes weights or moments"


def _train_and_evaluate(one: Setting, island: "MegatronIsland") -> Snapshot:
    losses = []
    for step in range(STEPS):
        losses.append(island.forward_backward(one.batches(island.lane.dp, step)))
        before = [shard.values.clone() for shard in island.gradients()]
        held_out = one.batches(island.lane.dp, OTHER)
        assert island.evaluate(held_out) == island.evaluate(held_out)
        assert all(map(torch.equal, before, (shard.values for shard in island.gradients())))
        island.update()
    return losses, _state(island)


def _resumed(one: Setting, world: "World") -> Snapshot:
    """Two steps, then everything that a checkpoint holds goes into a fresh island, which takes the others."""
    stopped = one.build(world)
    losses, tensors = _train(one, stopped, 0, 2)
    state = json.loads(json.dumps(stopped.state()))
    fresh = one.build(world)
    shards = [*fresh.weights(), *(shard for kind in fresh.optimizer_state().values() for shard in kind)]
    for shard, saved in zip(shards, tensors, strict=True):
        shard.values.copy_(saved)
    fresh.load_state(state)
    fresh.publish()
    fresh.random.load_state(stopped.random.state())
    more, final = _train(one, fresh, 2, STEPS - 2)
    return losses + more, final


def _in_turns(one: Setting, world: "World") -> tuple[Snapshot, Snapshot]:
    """Two islands on one world, a step each in turn: what each has in the end."""
    islands = [one.build(world), one.build(world)]
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        for island, first, lost in zip(islands, (0, OTHER), losses, strict=True):
            lost.append(island.forward_backward(one.batches(island.lane.dp, first + step)))
            island.update()
    return (losses[0], _state(islands[0])), (losses[1], _state(islands[1]))


@pytest.mark.parametrize("check", ["_recompute", "_random_streams"])
def test_on_one_rank(check: str) -> None:
    function: Callable[[], None] = globals()[check]
    run_ranks(1, function)


def _recompute() -> None:
    """Recomputation runs the attention twice and changes nothing."""
    from dilocox.islands.model import CausalAttention

    world = _start([setting()])
    runs: dict[Recompute, Snapshot] = {}
    calls: dict[Recompute, int] = {}
    for recompute in Recompute:
        one = setting(recompute=recompute)
        island = one.build(world)
        counted: list[int] = []
        for chunk in island._chunks:
            for module in chunk.modules():
                if isinstance(module, CausalAttention):
                    module.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        runs[recompute] = _train(one, island, 0, 2)
        calls[recompute] = len(counted)
    once = 2 * one.model.layers * one.island.microbatches
    assert calls == {Recompute.none: once, Recompute.selective: 2 * once, Recompute.full: 2 * once}
    for recompute in (Recompute.selective, Recompute.full):
        _same(runs[Recompute.none], runs[recompute], recompute.value)


def _random_streams() -> None:
    """Streams that take turns draw what each draws alone, and leave the process's own generator alone."""
    from dilocox.islands.mcore import tensor_parallel
    from dilocox.islands.world import RandomStream

    _start([setting()])

    def draw(stream: RandomStream) -> list[float]:
        with stream.turn():
            outside = torch.rand(()).item()
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return [outside, torch.rand(()).item()]

    alone = [[draw(stream) for _ in range(3)] for stream in (RandomStream(1), RandomStream(2))]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = RandomStream(1), RandomStream(2)
    in_turns = [[draw(one), draw(two)] for _ in range(3)]
    assert [list(draws) for draws in zip(*in_turns, strict=True)] == alone
    assert alone[0] != alone[1]
    assert torch.equal(torch.get_rng_state(), before)
    saved = one.state()
    following = draw(one)
    one.load_state(saved)
    assert draw(one) == following
