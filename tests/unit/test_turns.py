"""Islands of one process in turns: whose message is whose, and what becomes of the others when one fails."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox.launchers.inprocess import run_in_turns
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.loop import OuterLoop
from dilocox.outer.transport.memory import MemoryLaneGroup, StoppedError
from dilocox.shards import whole_shard
from tests.outer_harness import roles, run_islands

MESSAGES = 5


@given(st.permutations(range(MESSAGES)))
def test_the_nth_receive_gets_the_nth_message_in_whatever_order_one_waits(order: list[int]) -> None:
    def body(island: int, group: MemoryLaneGroup) -> list[int]:
        transport, peer = group.transport, 1 - island
        for number in range(MESSAGES):
            transport.send(peer, torch.tensor([10 * island + number], dtype=torch.uint8))
        buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(MESSAGES)]
        pending = [transport.receive(peer, buffer) for buffer in buffers]
        for number in order:
            pending[number].wait(deadline=0.0)
        return [int(buffer) for buffer in buffers]

    assert run_islands(2, body) == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]


class Recording(IslandGroup):
    """Notes the collectives that it is asked for."""

    def __init__(self, collectives: list[str]) -> None:
        super().__init__(None, torch.device("cpu"))
        self._collectives = collectives

    def sum(self, values: Sequence[float]) -> list[float]:
        self._collectives.append("sum")
        return super().sum(values)

    def worst(self, severities: Sequence[int]) -> list[int]:
        self._collectives.append("worst")
        return super().worst(severities)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_when_an_island_fails_the_others_stop_where_they_are_and_its_error_is_raised(failing: int) -> None:
    collectives: list[str] = []
    stopped: list[int] = []

    def body(island: int, group: MemoryLaneGroup) -> None:
        weights: Tensor = torch.zeros(4)
        loop = OuterLoop(
            [whole_shard("p", weights)],
            roles=roles(),
            lane_group=group,
            island_group=Recording(collectives),
            identity={},
            kernels="reference",
        )
        if island == failing:
            raise ValueError("the disk is full")
        with pytest.raises(StoppedError, match=f"island {failing} failed"):
            loop.after_update()
        stopped.append(island)

    with pytest.raises(ValueError, match="the disk is full"):
        run_in_turns(3, "lane", body)
    started = [island for island in range(3) if island < failing]  # the others were never given a turn
    assert sorted(stopped) == started
    assert collectives == []


def test_an_interrupt_ends_the_process_though_islands_are_running() -> None:
    program = (
        "import signal, time\n"
        "from dilocox.launchers.inprocess import run_in_turns\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts with it ignored
        "run_in_turns(2, 'lane', lambda island, group: (print('running', flush=True), time.sleep(600)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
