"""The CPU back end: C++ behind a plain C interface, for any torch and any Python.

`csrc/` is compiled when the package is installed, once for each level of instructions (x86-64-v4, -v3 and plain x86-64,
or aarch64); the best one that the processor has is chosen when the back end is made.
"""

import struct
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from dilocox_kernels.backend import BackendError
from dilocox_kernels.cpu import library
from dilocox_kernels.formats import GROUP_ELEMENTS, BlockFormat, Format
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans

_CODES = {"int8": 0, "int4": 1, "e2m1": 2, "e3m0": 3, "bins2": 4}
_CASTS = {"fp32": 5, "bf16": 6}
_SCALES = {"fp16": 0, "bf16": 1, "fp32": 2, "e4m4": 3}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INFINITY_BITS = 0x7F800000


class CpuBackend:
    """Implements `backend.Backend` for tensors in host memory, on torch.get_num_threads() threads."""

    name = "cpu"

    def __init__(self, level: str | None = None) -> None:
        """`level` names the instructions to use, one of `levels()`; None takes the best. All give the same bits.

        Raises BackendError if the library is not built or the processor has no such level.
        """
        self._library = library.load()
        if level is not None and level not in self._library.levels:
            raise BackendError(
                f"kernels=cpu: this processor has no level {level!r}; it has {', '.join(self._library.levels)}"
            )
        self._level = self._library.best_level if level is None else self._library.levels[level]

    @staticmethod
    def levels() -> tuple[str, ...]:
        """Levels of instructions that the library has for this processor, the best first."""
        return tuple(library.load().levels)

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
        job = _encode_job(fmt, _spans(spans, values), residual, decay, rounding, start, out, residual_out)
        job.anchor = _pointer(anchor)
        return self._encode(job)

    def decode_accumulate(
        self, fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor
    ) -> None:
        job = library.DecodeJob(_format(fmt), _spans(spans), _bodies(bodies, weights), out.data_ptr())
        self._library.decode_accumulate(self._level, byref(job), torch.get_num_threads())

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
        job = _encode_job(fmt, _spans(spans), residual, decay, rounding, start, out, residual_out)
        job.bodies = _bodies(bodies, weights)
        return self._encode(job)

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
        job = library.OuterStepJob(_format(fmt), _spans(spans, values), _bodies(bodies, weights))
        job.anchor, job.momentum = _pointer(anchor), _pointer(momentum)
        job.rule, job.lr, job.mu = rule.kind.value, rule.lr, rule.momentum
        job.local_weight, job.anchor_weight = local_weight, 1 - local_weight
        job.start = start
        job.tile_sums = (c_uint64 * _tiles(spans.numel))()
        self._library.outer_step(self._level, byref(job), torch.get_num_threads())
        return int(job.checksum)

    def _encode(self, job: library.EncodeJob) -> Norms:
        job.tile_norms = (library.TileNorms * _tiles(job.spans.numel))()
        self._library.encode(self._level, byref(job), torch.get_num_threads())
        (max_abs,) = struct.unpack("=f", struct.pack("=I", job.norms.delta_bits))
        return Norms(job.norms.sum_of_squares, max_abs, job.norms.value_bits < _INFINITY_BITS)


def _encode_job(
    fmt: Format,
    spans: library.Spans,
    residual: Tensor | None,
    decay: float,
    rounding: Stochastic | None,
    start: int,
    out: Tensor,
    residual_out: Tensor | None,
) -> library.EncodeJob:
    job = library.EncodeJob(_format(fmt), spans)
    job.residual, job.residual_out = _pointer(residual), _pointer(residual_out)
    for tensor in (residual, residual_out):  # alike where there are both
        if tensor is not None:
            job.residual_dtype = _DTYPES[tensor.dtype]
    job.decay = decay
    if rounding is not None:
        job.stochastic, job.key, job.round = 1, rounding.key, rounding.round
    job.start = start
    job.out = out.data_ptr()
    return job


def _format(fmt: Format) -> library.Format:
    if isinstance(fmt, BlockFormat):
        return library.Format(_CODES[fmt.code], _SCALES[fmt.scale], fmt.block_size, fmt.max_scale)
    return library.Format(_CASTS[fmt.dtype_name], 0, 0, 0.0)


def _spans(spans: Spans, values: Sequence[Tensor] = ()) -> library.Spans:
    """A structure keeps the arrays alive that its pointers were made from."""
    count = len(spans.bounds)
    starts = (c_int64 * count)(*(start for start, _ in spans.bounds))
    stops = (c_int64 * count)(*(stop for _, stop in spans.bounds))
    pointers = (c_void_p * len(values))(*(tensor.data_ptr() for tensor in values))
    dtype = _DTYPES[values[0].dtype] if values else 0
    return library.Spans(spans.numel, count, starts, stops, pointers, dtype)


def _bodies(bodies: Sequence[Tensor], weights: Sequence[float]) -> library.Bodies:
    pointers = (c_void_p * len(bodies))(*(body.data_ptr() for body in bodies))
    return library.Bodies(len(bodies), pointers, (c_float * len(weights))(*weights))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tiles(numel: int) -> int:
    return -(-numel // GROUP_ELEMENTS)
