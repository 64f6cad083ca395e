"""What a codec must do: turn a pseudo-gradient into wire bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dilocox_kernels.kernels import Kernels
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule
from dilocox_kernels.spans import Spans

__all__ = ["Codec", "Codes", "Destination", "Norms", "Origin"]


@dataclass(frozen=True)
class Origin:
    """Which message is encoded: what its random numbers, if it takes any, depend on."""

    number: int
    """Of the sync."""
    island: int
    fragment: int
    hop: int
    start: int
    """Of the range in the fragment's flat buffer."""


@dataclass(frozen=True)
class Destination:
    """Where an encoding goes, and what it starts from besides Δ. All lie where the outer state lives."""

    body: Tensor
    """uint8 [encoded bytes]"""
    committed: Tensor | None
    """Residual of the last committed sync, only read; None without error feedback, as is the other."""
    pending: Tensor | None
    """Residual that this encoding leaves."""


@dataclass(frozen=True)
class Codes:
    """The islands' bodies of one flat range, in island order, and their weights in the merge."""

    bodies: Sequence[Tensor]
    weights: Sequence[float]
    spans: Spans
    start: int
    """Of the range in the fragment's flat buffer."""

    def to(self, device: torch.device) -> "Codes":
        """With the bodies on `device`."""
        return Codes([body.to(device) for body in self.bodies], self.weights, self.spans, self.start)


class Codec(Protocol):
    """Encodes flat ranges, each independently of its neighbours.

    Error feedback: with a residual r (what earlier rounds failed to send) and Δ, the codec sends q ≈ Δ + decay·r and
    keeps Δ + decay·r − q. The caller owns both residual buffers and swaps them only when the round commits, so that a
    repeated sync sends the same bytes.
    """

    name: str
    alignment: int
    """Ranges start at multiples of this many elements, so that no block crosses a tensor."""
    error_feedback: bool
    residual_dtype: torch.dtype

    def encoded_bytes(self, numel: int) -> int:
        """Size of the encoded body of `numel` elements."""

    def encode(
        self,
        kernels: Kernels,
        values: Sequence[Tensor],
        spans: Spans,
        anchor: Tensor | None,
        origin: Origin,
        destination: Destination,
    ) -> Norms:
        """Encode Δ = anchor − values (one tensor a span), or the values where there is no anchor."""

    def requantise(self, kernels: Kernels, codes: Codes, origin: Origin, destination: Destination) -> Norms:
        """Encode the weighted sum of decoded bodies."""

    def decode(self, kernels: Kernels, codes: Codes, out: Tensor) -> None:
        """out [numel] = the weighted sum of decoded bodies, in fp32, in island order; gaps become zeros."""

    def outer_step(
        self,
        kernels: Kernels,
        codes: Codes,
        *,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
    ) -> int:
        """Move the anchor by the weighted sum of decoded bodies and write the local `values`; the anchor's checksum."""
