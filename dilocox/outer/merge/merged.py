"""The islands' pseudo-gradients of a flat range, still in codes, with all that it takes to use their merge."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.outer.codecs.protocol import Codec, Codes
from dilocox.outer.merge.mean import Merge
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.rules import OuterRule


@dataclass(frozen=True)
class Merged:
    codes: Codes
    """On the device of the outer state."""
    merge: Merge
    codec: Codec
    kernels: Kernels

    @property
    def start(self) -> int:
        """First element of the range in the fragment's flat buffer."""
        return self.codes.start

    @property
    def stop(self) -> int:
        return self.codes.start + self.codes.spans.numel

    def decode(self) -> Tensor:
        """The merged pseudo-gradient, in new memory: fp32 [stop − start], gaps as zeros."""
        out = torch.empty(self.codes.spans.numel, dtype=torch.float32, device=self.codes.bodies[0].device)
        self.merge.decode(self.codec, self.kernels, self.codes, out)
        return out

    def outer_step(
        self, anchor: Tensor, momentum: Tensor | None, values: Sequence[Tensor], rule: OuterRule, local_weight: float
    ) -> int:
        """Move the range's `anchor` and `momentum`, write its local `values` (one tensor a span): one pass.

        Returns the checksum of the new anchor.
        """
        return self.merge.outer_step(
            self.codec,
            self.kernels,
            self.codes,
            anchor=anchor,
            momentum=momentum,
            values=values,
            rule=rule,
            local_weight=local_weight,
        )
