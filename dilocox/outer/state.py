"""What the outer loop keeps of a fragment between syncs, on this rank: anchor, optimiser slots, residuals."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.outer.fragments import CHUNK_ELEMENTS, Fragment
from dilocox.outer.staging import Staging
from dilocox.shards import Shard
from dilocox_kernels.checksum import checksum64


class Residual:
    """Error feedback of one hop over a flat range: what earlier syncs could not send.

    Two buffers: `committed` belongs to the last committed sync and is only read; an encoding writes `pending`;
    `commit` swaps them. A sync that fails or is repeated therefore starts from the same residual and sends the same
    bytes. Both are None where the codec keeps no residual.
    """

    def __init__(self, start: int, stop: int, device: torch.device, dtype: torch.dtype, enabled: bool) -> None:
        self.start = start
        numel = stop - start
        self.committed = torch.zeros(numel, dtype=dtype, device=device) if enabled else None
        self.pending = torch.zeros(numel, dtype=dtype, device=device) if enabled else None

    def at(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """(committed, pending) over the flat range [start, stop)."""
        if self.committed is None or self.pending is None:
            return None, None
        low, high = start - self.start, stop - self.start
        return self.committed[low:high], self.pending[low:high]

    def commit(self) -> None:
        self.committed, self.pending = self.pending, self.committed


class FragmentState:
    """Outer state of one fragment; flat tensors of `fragment.numel` elements on `device`, all fp32 but residuals."""

    def __init__(
        self,
        fragment: Fragment,
        *,
        slots: Sequence[str],
        needs_anchor: bool,
        residuals: Sequence[Residual],
        device: torch.device,
        staging: Staging,
    ) -> None:
        self.fragment = fragment
        self.staging = staging
        self.device = device
        self.anchor = torch.zeros(fragment.numel if needs_anchor else 0, dtype=torch.float32, device=device)
        self.slots = {
            name: torch.zeros(fragment.numel, dtype=torch.float32, device=device) for name in slots if needs_anchor
        }
        self.residuals = list(residuals)
        self.outer_steps = 0
        self.checksum = 0
        """Of what all islands must share after the last committed sync: the anchor, or the merged gradient."""

    def adopt(self, values: Sequence[Tensor]) -> None:
        """Take the islands' common start weights as the first anchor."""
        if not self.anchor.numel():
            return
        for start, stop in self.fragment.ranges(CHUNK_ELEMENTS):
            self.fragment.read(values, start, stop, self.anchor[start:stop])
        self.refresh_checksum()

    def refresh_checksum(self) -> None:
        """Compute the checksum from the anchor; without one there is nothing to compare until the next sync."""
        self.checksum = checksum64(self.anchor) if self.anchor.numel() else 0

    def tensors(self) -> dict[str, list[Shard]]:
        """Views of everything that a checkpoint must hold, by kind and named by parameter."""
        named = {"anchor": self.fragment.owned_shards(self.anchor)} if self.anchor.numel() else {}
        named |= {name: self.fragment.owned_shards(slot) for name, slot in self.slots.items()}
        for hop, residual in enumerate(self.residuals):
            if residual.committed is not None:
                named[f"residual_{hop}"] = self.fragment.owned_shards(residual.committed, residual.start)
        return named
