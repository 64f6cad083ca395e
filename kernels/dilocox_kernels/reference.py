"""The reference back end: every operation in plain torch, on any device. It is the definition of all others.

Every step is an elementwise fp32 operation of its own (one rounding each, nothing fused), so results are the same on
every device and at any number of threads. Ranges are worked on in chunks of whole groups, with scratch for one chunk.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox_kernels.checksum import MODULUS, checksum64
from dilocox_kernels.formats import GROUP_ELEMENTS, CastFormat, Format
from dilocox_kernels.norms import Norms
from dilocox_kernels.philox import uniform
from dilocox_kernels.quantise import dequantise, quantise
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans

CPU_CHUNK_ELEMENTS = 16 * GROUP_ELEMENTS
"""Scratch of so many elements fits a core's cache."""
DEVICE_CHUNK_ELEMENTS = 256 * GROUP_ELEMENTS
"""Few launches; scratch of some 40 MiB."""


class ReferenceBackend:
    """Implements `backend.Backend`."""

    name = "reference"

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
    ) -> Norms:
        writer = _Writer(fmt, spans, residual, decay, rounding, start, out, residual_out)
        for low, high in _chunks(out, spans):
            delta = torch.zeros(high - low, device=out.device)
            for place, piece in zip(spans.within(low, high).cut(delta), spans.pieces(low, high, values), strict=True):
                place.copy_(piece)
            if anchor is not None:
                torch.sub(anchor[low:high], delta, out=delta)
            writer.write(delta, low)
        return writer.norms()

    def decode_accumulate(
        self, fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor
    ) -> None:
        for low, high in _chunks(out, spans):
            merged = _merge(fmt, bodies, weights, low, high, spans.numel)
            out[low:high] = torch.where(_real(spans, low, high, out.device), merged, 0)

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
    ) -> Norms:
        writer = _Writer(fmt, spans, residual, decay, rounding, start, out, residual_out)
        for low, high in _chunks(out, spans):
            writer.write(_merge(fmt, bodies, weights, low, high, spans.numel), low)
        return writer.norms()

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
    ) -> int:
        checksum = 0
        for low, high in _chunks(anchor, spans):
            merged = _merge(fmt, bodies, weights, low, high, spans.numel)
            inside, pieces = spans.within(low, high), spans.pieces(low, high, values)
            for (first, last), local in zip(inside.bounds, pieces, strict=True):
                here = slice(low + first, low + last)
                buffer = None if momentum is None else momentum[here]
                _step(merged[first:last], anchor[here], buffer, rule)
                _apply(anchor[here], local, local_weight)
                checksum += checksum64(anchor[here], start + here.start)
        return checksum % MODULUS


class _Writer:
    """Encodes Δ chunk by chunk, and keeps what was not sent."""

    def __init__(
        self,
        fmt: Format,
        spans: Spans,
        residual: Tensor | None,
        decay: float,
        rounding: Stochastic | None,
        start: int,
        out: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        self._fmt = fmt
        self._spans = spans
        self._residual = residual
        self._decay = decay
        self._rounding = rounding
        self._start = start
        self._out = out
        self._residual_out = residual_out
        self._sums: list[Tensor] = []
        self._max_abs = 0.0
        self._finite = True

    def write(self, delta: Tensor, low: int) -> None:
        """Take in Δ of the chunk that starts at `low`, fp32 [n]; what it holds in gaps does not matter."""
        high = low + delta.numel()
        real = _real(self._spans, low, high, delta.device)
        delta = torch.where(real, delta, 0)
        sent = delta
        if self._residual is not None:
            kept = torch.where(real, self._residual[low:high].to(torch.float32), 0)
            sent = kept.mul_(self._decay).add_(delta)
        self._max_abs = max(self._max_abs, delta.abs().amax().item())
        self._sums.append(_sum_of_squares(delta))
        if not bool(sent.isfinite().all()):
            self._finite = False
            return
        decoded = self._encode(sent, real, low)
        if self._residual_out is not None:
            kept = _cast(sent - decoded, self._residual_out.dtype)
            for place, part in zip(
                self._spans.within(low, high).cut(self._residual_out[low:high]),
                self._spans.within(low, high).cut(kept),
                strict=True,
            ):
                place.copy_(part)

    def _encode(self, sent: Tensor, real: Tensor, low: int) -> Tensor:
        if isinstance(self._fmt, CastFormat):
            cast = _cast(sent, self._fmt.dtype)
            self._out.view(self._fmt.dtype)[low : low + sent.numel()] = cast
            return cast.to(torch.float32)
        noise = None
        if self._rounding is not None:
            positions = torch.arange(low, low + sent.numel(), device=sent.device) + self._start
            noise = uniform(self._rounding.key, self._rounding.round, positions)
        return quantise(self._fmt, sent, real, noise, self._out, self._spans.numel, low)

    def norms(self) -> Norms:
        return Norms(math.fsum(total.item() for total in self._sums), self._max_abs, self._finite)


def _merge(fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], low: int, high: int, numel: int) -> Tensor:
    """Σ wₖ · decodedₖ of elements [low, high), in fp32, in the order of the islands."""
    merged = torch.zeros(high - low, device=bodies[0].device)
    for body, weight in zip(bodies, weights, strict=True):
        factor = torch.tensor(weight, dtype=torch.float32, device=body.device)
        if isinstance(fmt, CastFormat):
            merged += body.view(fmt.dtype)[low:high].to(torch.float32) * factor
        else:
            merged += dequantise(fmt, body, numel, low, high, factor)
    return merged


def _step(delta: Tensor, anchor: Tensor, momentum: Tensor | None, rule: OuterRule) -> None:
    """Move `anchor` and `momentum` against Δ, in place; Δ is overwritten."""
    if momentum is not None:
        momentum.mul_(rule.momentum).add_(delta)
        if rule.kind is Rule.NESTEROV:
            delta.add_(momentum * rule.momentum)
        else:
            delta.copy_(momentum)
    anchor.sub_(delta.mul_(rule.lr))


def _apply(anchor: Tensor, local: Tensor, local_weight: float) -> None:
    """local ← local_weight · local + (1 − local_weight) · anchor."""
    if local_weight == 0:
        local.copy_(anchor)
    else:
        local.copy_((local.to(torch.float32) * local_weight).add_(anchor * (1 - local_weight)))


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest even; what exceeds the largest finite value becomes that."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _real(spans: Spans, low: int, high: int, device: torch.device) -> Tensor:
    """bool [high − low]: what is no gap."""
    real = torch.zeros(high - low, dtype=torch.bool, device=device)
    for place in spans.within(low, high).cut(real):
        place.fill_(True)
    return real


def _chunks(tensor: Tensor, spans: Spans) -> Iterator[tuple[int, int]]:
    chunk = CPU_CHUNK_ELEMENTS if tensor.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    for low in range(0, spans.numel, chunk):
        yield low, min(low + chunk, spans.numel)


def _sum_of_squares(values: Tensor) -> Tensor:
    """In float64, halves added element by element: torch.sum picks its order by threads and vector width."""
    width = 1 << (values.numel() - 1).bit_length()
    sums = torch.zeros(width, dtype=torch.float64, device=values.device)
    sums[: values.numel()] = values
    sums.mul_(sums)
    while width > 1:
        width //= 2
        sums = sums[:width] + sums[width:]
    return sums
