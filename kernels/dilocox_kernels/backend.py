"""What a back end does. `kernels.Kernels` checks the arguments first; back ends get none that are wrong."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dilocox_kernels.formats import Format
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans


class BackendError(RuntimeError):
    """A back end that cannot be had here; says why, and what to do."""


class Backend(Protocol):
    """The operations of `Kernels`, with the same meaning, on checked arguments.

    What an operation leaves in its outputs when norms.finite is False does not matter: the caller zeroes them.
    """

    name: str

    def encode(
        self,
        fmt: Format,
        values: Sequence[Tensor],
        spans: Spans,
        anchor: Tensor | None,
        residual: Tensor | None,
        decay: float,
        rounding: Stochastic | None,
        start: int,
        out: Tensor,
        residual_out: Tensor | None,
    ) -> Norms: ...

    def decode_accumulate(
        self, fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor
    ) -> None: ...

    def requantise(
        self,
        fmt: Format,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        spans: Spans,
        residual: Tensor | None,
        decay: float,
        rounding: Stochastic | None,
        start: int,
        out: Tensor,
        residual_out: Tensor | None,
    ) -> Norms: ...

    def outer_step(
        self,
        fmt: Format,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        spans: Spans,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
        start: int,
    ) -> int: ...
