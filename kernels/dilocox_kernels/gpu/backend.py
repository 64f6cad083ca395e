"""The Triton back end: the operations of dilocox_kernels on NVIDIA and AMD GPUs, each in one pass."""

import contextlib
import struct
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from dilocox_kernels.backend import BackendError
from dilocox_kernels.checksum import MODULUS
from dilocox_kernels.formats import Format
from dilocox_kernels.gpu import kernels, launches
from dilocox_kernels.gpu.launches import Launch, Sums, Tiling
from dilocox_kernels.gpu.tuning import fixed_tiling, tuned_tiling
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans

INTERPRETED = not isinstance(kernels.encode, triton.JITFunction)
"""Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set when this package was imported."""
_INFINITY_BITS = 0x7F800000


class TritonBackend:
    """Implements `backend.Backend` for tensors on GPUs; bits equal those of `ReferenceBackend`.

    BackendError for a device that Triton has no kernels for. In the interpreter a CPU will do (slowly: for tests).
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not INTERPRETED:
            raise BackendError(
                f"kernels=triton: Triton runs on NVIDIA and AMD GPUs, not on device {device}; choose kernels=cpu or "
                "kernels=reference, or, to test it slowly, set TRITON_INTERPRET=1 before the start"
            )

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
        tiling = _tiling("encode", fmt, out.device)
        started, sums = launches.encode(
            fmt, values, spans, anchor, residual, decay, rounding, start, out, residual_out, tiling
        )
        _run(started, out.device)
        return _norms(sums)

    def decode_accumulate(
        self, fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor
    ) -> None:
        tiling = _tiling("decode_accumulate", fmt, out.device)
        _run(launches.decode_accumulate(fmt, bodies, weights, spans, out, tiling), out.device)

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
        tiling = _tiling("requantise", fmt, out.device)
        started, sums = launches.requantise(
            fmt, bodies, weights, spans, residual, decay, rounding, start, out, residual_out, tiling
        )
        _run(started, out.device)
        return _norms(sums)

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
        tiling = _tiling("outer_step", fmt, anchor.device)
        started, checksums = launches.outer_step(
            fmt, bodies, weights, spans, anchor, momentum, values, rule, local_weight, start, tiling
        )
        _run(started, anchor.device)
        return int(checksums.sum()) % MODULUS


def _tiling(operation: str, fmt: Format, device: torch.device) -> Tiling:
    return fixed_tiling(operation, fmt) if INTERPRETED else tuned_tiling(operation, fmt, device)


def _run(started: Sequence[Launch], device: torch.device) -> None:
    with contextlib.nullcontext() if INTERPRETED else torch.cuda.device(device):
        for launch in started:
            launch.run()


def _norms(sums: Sums) -> Norms:
    """One read of the device. Bits of fp32 are exact in fp64."""
    if len(sums.squares) == 0:
        return Norms(0.0, 0.0, True)
    total = torch.cat([sums.squares.sum().view(1), sums.peaks.amax(dim=0).to(torch.float64)])
    sum_of_squares, delta_bits, value_bits = total.tolist()
    max_abs = struct.unpack("<f", struct.pack("<i", int(delta_bits)))[0]
    return Norms(sum_of_squares, max_abs, value_bits < _INFINITY_BITS)
