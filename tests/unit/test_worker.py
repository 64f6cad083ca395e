"""What a rank's process sets up before it trains."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilocox.config import load_config
from dilocox.launchers.worker import island_world


@pytest.mark.parametrize("timeout_s", [5, 7200])
def test_ranks_of_an_island_outwait_any_wait_for_another_island(timeout_s: int) -> None:
    config = load_config(["island=single", "device=cpu", f"participation.timeout_s={timeout_s}"])
    with island_world(config):
        group: Any = dist.group.WORLD
        inside = group._get_backend(torch.device("cpu")).options._timeout
        assert inside > 2 * timedelta(seconds=timeout_s)
    assert not dist.is_initialized()
