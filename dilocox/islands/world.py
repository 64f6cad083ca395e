"""The process world of one island: torch.distributed, Megatron's groups, the groups of replicas, random streams.

An island is started by torchrun or srun with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without any of them it is
one rank. Several islands of one process share a world and take turns on it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dilocox.config import Device
from dilocox.errors import ConfigError
from dilocox.islands.mcore import parallel_state, tensor_parallel
from dilocox.topology import Lane, Layout

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This rank's place in its island, and the groups it belongs to."""

    layout: Layout
    lane: Lane
    device: torch.device
    group: ProcessGroup | None
    """All ranks of the island; None when the island is one rank."""
    _ends_and_dp: ProcessGroup | None

    def replicas(self, *, tp: bool = False, dp: bool = False, ends: bool = False) -> ProcessGroup | None:
        """The ranks that differ from this one in the given dimensions only; None where that is this rank alone.

        `ends` spans the first and the last pipeline stage and is for ranks of those stages.
        """
        tp, dp, ends = tp and self.layout.tp > 1, dp and self.layout.dp > 1, ends and self.layout.pp > 1
        groups: dict[tuple[bool, bool, bool], Any] = {
            (True, False, False): parallel_state.get_tensor_model_parallel_group,
            (False, True, False): parallel_state.get_data_parallel_group,
            (True, True, False): parallel_state.get_tensor_and_data_parallel_group,
            (False, False, True): parallel_state.get_embedding_group,
            (False, True, True): lambda: self._ends_and_dp,
            (False, False, False): lambda: None,
        }
        group: ProcessGroup | None = groups[tp, dp, ends]()
        return group


def start_world(layout: Layout, device: Device, timeout: timedelta = timedelta(minutes=30)) -> World:
    """Join the island's world and build Megatron's groups; collective over all ranks of the island.

    Raises ConfigError when the device cannot be had, the environment is incomplete, or the number of ranks is not
    tp · pp · dp.
    """
    # Read when CUDA starts: Megatron overlaps its all-reduces with matmuls in the order in which it starts them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    place = _device(device)
    rank, world_size = _rank_and_size(layout)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
    )
    lane = layout.lane(rank)
    return World(
        layout=layout,
        lane=lane,
        device=place,
        group=dist.group.WORLD if world_size > 1 else None,
        _ends_and_dp=_ends_and_dp_group(layout, lane, timeout),
    )


def stop_world() -> None:
    """Leave the island's world; the islands built on it must not be used any more."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _device(device: Device) -> torch.device:
    found = torch.cuda.is_available()
    if device is Device.cuda and not found:
        raise ConfigError("device", "cuda", "torch finds no CUDA device here", "Set device=auto or cpu")
    if device is Device.cpu and found:
        raise ConfigError(
            "device",
            "cpu",
            "Megatron uses the GPUs that it sees, and this machine has some",
            "Hide them with CUDA_VISIBLE_DEVICES= (empty), or set device=auto",
        )
    if not found:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "LOCAL_RANK", local_rank, f"this machine has {torch.cuda.device_count()} GPUs", "Start fewer ranks on it"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _rank_and_size(layout: Layout) -> tuple[int, int]:
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing and len(missing) < len(ENVIRONMENT):
        raise ConfigError(
            missing[0],
            None,
            "is not set though others of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are",
            "Start the island with torchrun, or set all four in the srun script (or none, for an island of one rank)",
        )
    rank, world_size = (0, 1) if missing else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if world_size != layout.world_size:
        raise ConfigError(
            "WORLD_SIZE",
            world_size,
            f"the layout tp={layout.tp}, pp={layout.pp}, dp={layout.dp} needs {layout.world_size} ranks",
            f"Start {layout.world_size} ranks or change island.tp, island.pp, island.dp",
        )
    return rank, world_size


def _ends_and_dp_group(layout: Layout, lane: Lane, timeout: timedelta) -> ProcessGroup | None:
    """The group of this lane's tp rank over all dp ranks of the first and last stage: it holds a tied embedding.

    Every rank builds the groups of all tp ranks in the same order, as `new_group` asks.
    """
    if layout.pp == 1 or layout.dp == 1:
        return None
    mine = None
    for tp in range(layout.tp):
        ranks = [layout.rank(Lane(tp=tp, pp=pp, dp=dp)) for pp in (0, layout.pp - 1) for dp in range(layout.dp)]
        group = dist.new_group(ranks, timeout=timeout)
        if tp == lane.tp and lane.pp in (0, layout.pp - 1):
            mine = group
    return mine


class RandomStream:
    """The random numbers of one island: torch's CPU and CUDA generators and Megatron's tracker.

    They are global to the process. `turn()` swaps this island's in and puts the caller's back, so that islands that
    share a process draw the same numbers as islands that do not.
    """

    def __init__(self, seed: int) -> None:
        before = _generators()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self._state = _generators()
        _set_generators(before)

    @contextmanager
    def turn(self) -> Iterator[None]:
        before = _generators()
        _set_generators(self._state)
        try:
            yield
        finally:
            self._state = _generators()
            _set_generators(before)

    def state(self) -> dict[str, Tensor]:
        """uint8 tensors by generator ("cpu", "cuda" where there is one, "tracker/NAME"), for a checkpoint."""
        return dict(self._state)

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._state = dict(state)


def _generators() -> dict[str, Tensor]:
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    state = {"cpu": torch.get_rng_state()} | {f"tracker/{name}": tensor for name, tensor in tracked.items()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_generators(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    prefix = "tracker/"
    tracked = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
