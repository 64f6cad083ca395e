"""The operations, with their arguments checked before anything is written, over a back end chosen once."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dilocox_kernels.backend import Backend, BackendError
from dilocox_kernels.formats import Format
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans
from dilocox_kernels.validate import check_codec, check_merge, check_step, check_values

BACKENDS = ("auto", "reference", "cpu", "triton")


class Kernels:
    """What turns pseudo-gradients into wire bytes and back, and takes the outer step.

    A flat range of `spans.numel` elements is encoded as one body. `values` is one 1-D tensor a span (fp32, bf16 or
    fp16, all alike: local weights, each where its model has it); `anchor` and `momentum` are flat, fp32; residuals are
    flat, fp32 or bf16; bodies are uint8. All arithmetic is fp32 with one rounding an operation. `start` is the position
    of the range in its fragment: it counts for stochastic rounding and checksums. Results are the same bits on every
    back end, at any number of threads, and however a range is cut at multiples of formats.GROUP_ELEMENTS.

    Every operation raises ValueError, and writes nothing, for a wrong dtype, device or length, for buffers that are not
    contiguous or overlap, and for spans that are not aligned to the format's blocks.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """Of the back end."""
        return self._backend.name

    def encode(
        self,
        fmt: Format,
        values: Sequence[Tensor],
        spans: Spans,
        *,
        anchor: Tensor | None,
        residual: Tensor | None,
        decay: float,
        rounding: Stochastic | None,
        start: int,
        out: Tensor,
        residual_out: Tensor | None,
    ) -> Norms:
        """Encode v = Δ + decay · residual into `out`, and keep v − decoded in `residual_out`, in one pass.

        Δ = anchor − values, or the values themselves where `anchor` is None. A NaN or infinity in v is never encoded:
        norms.finite is False, and `out` and `residual_out` are zeros.
        """
        check_values(values, spans, writes=False)
        check_codec(fmt, spans, rounding, start, out, residual, residual_out, anchor=anchor, values=values, bodies=())
        norms = self._backend.encode(fmt, values, spans, anchor, residual, decay, rounding, start, out, residual_out)
        return _wipe_unless_finite(norms, out, residual_out)

    def decode(self, fmt: Format, body: Tensor, spans: Spans, out: Tensor) -> None:
        """Decode a body into fp32 `out` [numel]; gaps become zeros."""
        self.decode_accumulate(fmt, [body], [1.0], spans, out)

    def decode_accumulate(
        self, fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor
    ) -> None:
        """out [numel] = Σ wₖ · decodedₖ in fp32, in the order of the bodies; gaps become zeros.

        A block's scale is multiplied by the weight first: wₖ · decodedₖ = magnitude · fp32(wₖ · scale).
        """
        check_merge(fmt, bodies, weights, spans, out)
        self._backend.decode_accumulate(fmt, bodies, weights, spans, out)

    def requantise(
        self,
        fmt: Format,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        spans: Spans,
        *,
        residual: Tensor | None,
        decay: float,
        rounding: Stochastic | None,
        start: int,
        out: Tensor,
        residual_out: Tensor | None,
    ) -> Norms:
        """Encode v = Δ + decay · residual with Δ = Σ wₖ · decodedₖ, in one pass: `decode_accumulate`, then `encode`."""
        check_merge(fmt, bodies, weights, spans, None)
        check_codec(fmt, spans, rounding, start, out, residual, residual_out, anchor=None, values=(), bodies=bodies)
        norms = self._backend.requantise(
            fmt, bodies, weights, spans, residual, decay, rounding, start, out, residual_out
        )
        return _wipe_unless_finite(norms, out, residual_out)

    def outer_step(
        self,
        fmt: Format,
        bodies: Sequence[Tensor],
        weights: Sequence[float],
        spans: Spans,
        *,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
        start: int,
    ) -> int:
        """Merge, move `anchor` and `momentum` by `rule`, write local weights: one pass over each.

        values ← local_weight · values + (1 − local_weight) · anchor, rounded to their dtype; 0 overwrites. Returns the
        `checksum64` of the new anchor at its position `start`, gaps counting nothing.
        """
        check_merge(fmt, bodies, weights, spans, None)
        check_values(values, spans, writes=True)
        check_step(spans, bodies, anchor, momentum, values, rule, local_weight, start)
        return self._backend.outer_step(
            fmt, bodies, weights, spans, anchor, momentum, values, rule, local_weight, start
        )


@cache
def select(name: str, device_type: str) -> Kernels:
    """The back end of that name for tensors on devices of a type; `auto` is triton on "cuda", cpu on "cpu".

    Raises BackendError when it cannot be had here: nothing falls back to a slower one.
    """
    if name == "auto":
        known = {"cuda": "triton", "cpu": "cpu"}
        if device_type not in known:
            raise BackendError(f"kernels=auto: nothing is known for {device_type} tensors; choose kernels=reference")
        return select(known[device_type], device_type)
    if name == "reference":
        from dilocox_kernels.reference import ReferenceBackend

        return Kernels(ReferenceBackend())
    if name == "cpu":
        if device_type != "cpu":
            raise BackendError(
                f"kernels=cpu works on tensors in host memory, not on {device_type}; choose kernels=auto"
            )
        from dilocox_kernels.cpu import CpuBackend

        return Kernels(CpuBackend())
    if name == "triton":
        from dilocox_kernels.gpu import TritonBackend

        return Kernels(TritonBackend(torch.device(device_type)))
    raise BackendError(f"kernels={name!r}: expected one of {', '.join(BACKENDS)}")


def _wipe_unless_finite(norms: Norms, out: Tensor, residual_out: Tensor | None) -> Norms:
    if not norms.finite:
        out.zero_()
        if residual_out is not None:
            residual_out.zero_()
    return norms
