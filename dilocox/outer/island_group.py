"""What all lanes of an island decide together, so that its shards never come apart."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dilocox.errors import DriftError
from dilocox.outer.fragments import by_replicas
from dilocox.shards import Shard
from dilocox_kernels.checksum import checksum64


class IslandGroup:
    """Sums over the ranks of one island; `group` is None for an island of one rank."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise float64 sums over the island, equal on all its ranks."""
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def largest(self, value: float) -> float:
        """The largest over the island, equal on all its ranks."""
        if self._group is None:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.item()

    def worst(self, severities: Sequence[int]) -> list[int]:
        """Elementwise maxima over the island, equal on all its ranks."""
        if self._group is None:
            return list(severities)
        highest = torch.tensor(severities, dtype=torch.int64, device=self._device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        return highest.tolist()

    def check_replicas(self, shards: Sequence[Shard], values: Sequence[Tensor], where: str) -> None:
        """Raise DriftError on every rank when ranks that hold the same shards hold different bits.

        Each rank sends the checksums of the shards of each replicas group to that group (8 bytes a shard).
        """
        names: set[str] = set()
        for group, members in by_replicas(shards):
            if group is None:
                continue
            checksums = [_signed(checksum64(values[i].view(torch.uint8))) for i in members]
            mine = torch.tensor(checksums, device=self._device)
            gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, mine, group=group)
            unequal = torch.stack(gathered).ne(gathered[0]).any(dim=0).tolist()
            names |= {shards[i].name for i, bad in zip(members, unequal, strict=True) if bad}
        if self.worst([len(names)])[0]:
            which = f"here: {sorted(names)[:3]}" if names else "on another rank of this island"
            raise DriftError(
                f"{where}: replicas inside the island differ after the sync, {which}. Resume from the last checkpoint; "
                "if it happens again, suspect the memory or the links of this island's machines"
            )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def first_nonfinite(shards: Sequence[Shard], values: Sequence[Tensor]) -> str:
    """Where a NaN or infinity comes from, as a part of an error's sentence."""
    for shard, tensor in zip(shards, values, strict=True):
        if not bool(torch.isfinite(tensor).all()):
            return f"first in {shard.name}"
    return "though all parameters are finite: they, or what earlier syncs could not send, are too large for fp32"
