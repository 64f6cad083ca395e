"""The outer loop in anybody's training loop: on a plain module, under DistributedDataParallel, or on FSDP2's shards.

An island is then one process, or one torch.distributed world; Megatron and Hydra are not needed.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from dilocox.errors import ConfigError
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.loop import OuterLoop
from dilocox.outer.roles import Roles
from dilocox.outer.transport.gloo import GlooLaneGroup, address_towards, shake_hands
from dilocox.outer.transport.memory import alone
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.outer.transport.rendezvous import connect_store, parse_address
from dilocox.shards import Box, Shard, whole_shard


def attach(
    module: nn.Module,
    *,
    rendezvous: str | None,
    island: int,
    islands: int,
    roles: Roles,
    kernels: str = "auto",
) -> OuterLoop:
    """An outer loop over the trainable parameters of `module`, which all islands must have initialised alike.

    `rendezvous` is the `host:port` where `dilocox coordinator` runs; None for a single island. With torch.distributed
    initialised, its world is this island and every rank calls this. The pseudo-gradient is a difference of these
    parameters: keep them in fp32 (under autocast or FSDP2's mixed precision), for bf16 ones lose most of a small one.
    `kernels` names the back end of dilocox_kernels.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shards = shards_of(module)
    if not shards:
        raise ConfigError("module", type(module).__name__, "has no trainable parameters", "Unfreeze some")
    if size > 1:
        _refuse_lone_copies(module, size)
    identity: dict[str, object] = {"ranks": size, "kind of device": shards[0].values.device.type, **describe(roles)}
    identity |= {f"parameter {shard.name}": list(shard.box.global_shape) for shard in shards}
    timeout_s = roles.participation.timeout_s
    lane_group = join(
        rendezvous, identity, island=island, islands=islands, lane=f"rank{rank}", leader=rank == 0, timeout_s=timeout_s
    )
    return OuterLoop(
        shards,
        roles=roles,
        lane_group=lane_group,
        island_group=IslandGroup(dist.group.WORLD if size > 1 else None, shards[0].values.device),
        identity=identity,
        kernels=kernels,
        gradients=lambda: _gradients_of(module, shards),
    )


def join(
    rendezvous: str | None,
    identity: Mapping[str, object],
    *,
    island: int,
    islands: int,
    lane: str,
    leader: bool,
    timeout_s: float,
) -> LaneGroup:
    """Meet the other islands at `host:port`, compare settings, and connect this lane to theirs.

    Raises ConfigError for an address or island that cannot be, HandshakeError when nobody is there or islands differ.
    """
    if not 0 <= island < islands:
        raise ConfigError("island", island, f"not in 0…{islands - 1} (islands={islands})", "Count islands from 0")
    if islands == 1:
        return alone(lane)
    meeting_point = parse_address(rendezvous)
    store = connect_store(meeting_point, timeout_s)
    shake_hands(store, identity, island=island, islands=islands, lane=lane, leader=leader, timeout_s=timeout_s)
    address = address_towards(*meeting_point)
    return GlooLaneGroup(store, island=island, islands=islands, lane=lane, address=address, timeout_s=timeout_s)


def describe(roles: Roles) -> dict[str, object]:
    """The choices and settings of all roles, flat, for handshakes and records."""
    described: dict[str, object] = {}
    for role, choice in vars(roles).items():
        if role != "participation":  # how long an island waits is its own business
            described[role] = type(choice).__name__
            settings = {
                key: value for key, value in vars(choice).items() if isinstance(value, bool | int | float | str | tuple)
            }
            described |= {f"{role}.{key}": value for key, value in settings.items()}
    return described


def shards_of(module: nn.Module) -> list[Shard]:
    """The trainable parameters of a module as Shards, views of its own memory.

    Under DistributedDataParallel the ranks of its group are replicas and split the outer work; of a DTensor the local
    shard is taken. Buffers (running statistics) are not parameters and stay local.
    """
    replicas: ProcessGroup | None = None
    if isinstance(module, DistributedDataParallel):
        replicas = module.process_group if dist.get_world_size(module.process_group) > 1 else None
        module = module.module
    return [
        _dtensor_shard(name, parameter)
        if isinstance(parameter, DTensor)
        else whole_shard(name, _contiguous(name, parameter), replicas)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def _refuse_lone_copies(module: nn.Module, ranks: int) -> None:
    """Nothing would keep copies equal that neither DistributedDataParallel nor a DTensor looks after."""
    if isinstance(module, DistributedDataParallel):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise ConfigError(
                "module",
                type(module).__name__,
                f"each of the island's {ranks} ranks would train its own copy of {name}",
                "Wrap the module in DistributedDataParallel, or shard it with fully_shard",
            )


def _contiguous(name: str, parameter: Tensor) -> Tensor:
    if not parameter.is_contiguous():
        raise ConfigError(
            f"parameter {name}",
            tuple(parameter.stride()),
            "is not contiguous in memory",
            "Assign parameter.contiguous()",
        )
    return parameter


def _dtensor_shard(name: str, parameter: DTensor) -> Shard:
    mesh, placements = parameter.device_mesh, parameter.placements
    odd = [placement for placement in placements if type(placement) not in (Split, Replicate)]
    copies = [
        dim for dim, placement in enumerate(placements) if isinstance(placement, Replicate) and mesh.size(dim) > 1
    ]
    if odd or len(copies) > 1:
        raise ConfigError(
            f"parameter {name}",
            placements,
            "a placement that has no plain shards",
            "Use Shard and at most one Replicate",
        )
    local = _contiguous(name, parameter.to_local())
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    box = Box(tuple(parameter.shape), tuple(offset), tuple(shape))
    replicas = mesh.get_group(copies[0]) if copies else None
    return Shard(name, box, 0, box.numel, local.detach().view(-1), replicas)


def _gradients_of(module: nn.Module, shards: list[Shard]) -> list[Shard]:
    """The gradients behind `shards`, in their order; a parameter without one counts as zero."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    parameters = dict(inner.named_parameters())
    lent = []
    for shard in shards:
        parameter = parameters[shard.name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        lent.append(Shard(shard.name, shard.box, shard.start, shard.stop, gradient.view(-1), shard.replicas))
    return lent
