"""From the arguments of an operation to launches of its kernel: one over whole tiles, one over the others.

The same launches run on a GPU, in the interpreter, or are compiled ahead of time (`compiled.py`).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
import triton.language as tl
from torch import Tensor

from dilocox_kernels.formats import BlockFormat, Format
from dilocox_kernels.gpu import kernels
from dilocox_kernels.gpu.coding import coding
from dilocox_kernels.gpu.plan import Plan, plan_tiles
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans

_ELEMENTS_AT_ONCE = 4
"""Elements that a thread moves at once where fp32 is stored (16 bytes of it)."""


_VALUE_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By their bytes."""


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut: elements a program, warps (wavefronts on AMD) that share them."""

    tile: int
    num_warps: int


@dataclass(frozen=True)
class Launch:
    """One start of a kernel with everything that it takes."""

    kernel: object
    programs: int
    arguments: dict[str, object]
    num_warps: int

    def run(self) -> None:
        # fp_fusion off: a multiplication and an addition round twice, as in the reference.
        self.kernel[(self.programs,)](**self.arguments, num_warps=self.num_warps, enable_fp_fusion=False)  # type: ignore[index]


@dataclass(frozen=True)
class Sums:
    """What the tiles of a range found out; `Norms` and checksum are made of it."""

    squares: Tensor
    """fp64 [tiles]: Σ Δ²."""
    peaks: Tensor
    """int32 [tiles, 2]: bits of the largest |Δ| and |v|."""


def encode(
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
    tiling: Tiling,
) -> tuple[list[Launch], Sums]:
    """Launches of `encode` and where they leave the norms."""
    wide = residual_out is not None and residual_out.dtype == torch.float32
    alignment = _ELEMENTS_AT_ONCE * values[0].itemsize if wide and values else 16
    plan = plan_tiles(spans.numel, spans.bounds, values, tiling.tile, alignment, out.device)
    sending, sums = _sending(fmt, spans.numel, residual, decay, rounding, start, out, residual_out, plan)
    arguments = {"anchor": anchor, "VALUE": _value_dtype(values), "ALIGNED": alignment} | sending
    return list(_launches(kernels.encode, plan, tiling, arguments)), sums


def requantise(
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
    tiling: Tiling,
) -> tuple[list[Launch], Sums]:
    """Launches of `requantise` and where they leave the norms."""
    plan = plan_tiles(spans.numel, spans.bounds, (), tiling.tile, 1, out.device)
    sending, sums = _sending(fmt, spans.numel, residual, decay, rounding, start, out, residual_out, plan)
    arguments = _merging(fmt, bodies, weights, spans.numel, out.device) | sending
    return list(_launches(kernels.requantise, plan, tiling, arguments)), sums


def decode_accumulate(
    fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor, tiling: Tiling
) -> list[Launch]:
    """Launches of `decode_accumulate`."""
    plan = plan_tiles(spans.numel, spans.bounds, (), tiling.tile, 1, out.device)
    arguments = _merging(fmt, bodies, weights, spans.numel, out.device) | {"out": out}
    return list(_launches(kernels.decode_accumulate, plan, tiling, arguments))


def outer_step(
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
    tiling: Tiling,
) -> tuple[list[Launch], Tensor]:
    """Launches of `outer_step`, and where they leave the checksums of the tiles, int64 [tiles]."""
    alignment = _ELEMENTS_AT_ONCE * values[0].itemsize if values else 16
    plan = plan_tiles(spans.numel, spans.bounds, values, tiling.tile, alignment, anchor.device)
    checksums = torch.empty(plan.tiles, dtype=torch.int64, device=anchor.device)
    arguments = _merging(fmt, bodies, weights, spans.numel, anchor.device) | {
        "anchor": anchor,
        "momentum": momentum,
        "lr": rule.lr,
        "mu": rule.momentum,
        "local_weight": local_weight,
        "anchor_weight": 1.0 - local_weight,
        "start": start,
        "checksums": checksums,
        "RULE": rule.kind.name,
        "MIX": local_weight != 0,
        "VALUE": _value_dtype(values),
        "ALIGNED": alignment,
    }
    return list(_launches(kernels.outer_step, plan, tiling, arguments)), checksums


def _launches(kernel: object, plan: Plan, tiling: Tiling, arguments: dict[str, object]) -> Iterator[Launch]:
    blocks = tiling.tile // arguments["F"].block  # type: ignore[attr-defined]
    for whole, rows in ((True, plan.whole), (False, plan.partial)):
        if len(rows):
            here = {"plan": rows, "spans": plan.spans, "BLOCKS": blocks, "WHOLE": whole}
            yield Launch(kernel, len(rows), here | arguments, tiling.num_warps)


def _merging(
    fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], numel: int, device: torch.device
) -> dict[str, object]:
    """Arguments of a merge: the table of bodies, int64 [bodies, 4], and what it means."""
    rows = []
    for body, weight in zip(bodies, weights, strict=True):
        parts = _parts(fmt, body, numel)
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        rows.append([*addresses, *struct.unpack("<i", struct.pack("<f", weight))])
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    return {
        "bodies": table,
        "count": len(rows),
        "numel": numel,
        "F": coding(fmt),
        "ALIGNMENT": _cast_alignment(fmt, bodies),
    }


def _sending(
    fmt: Format,
    numel: int,
    residual: Tensor | None,
    decay: float,
    rounding: Stochastic | None,
    start: int,
    out: Tensor,
    residual_out: Tensor | None,
    plan: Plan,
) -> tuple[dict[str, object], Sums]:
    """Arguments of what encodes."""
    sums = Sums(
        torch.empty(plan.tiles, dtype=torch.float64, device=out.device),
        torch.empty(plan.tiles, 2, dtype=torch.int32, device=out.device),
    )
    codes, bases, scales = _parts(fmt, out, numel)
    arguments: dict[str, object] = {
        "residual": _bits(residual),
        "decay": decay,
        "start": start,
        "key": rounding.key if rounding else 0,
        "round": rounding.round if rounding else 0,
        "codes": codes,
        "bases": bases,
        "scales": scales,
        "residual_out": _bits(residual_out),
        "squares": sums.squares,
        "peaks": sums.peaks,
        "numel": numel,
        "F": coding(fmt),
        "STOCHASTIC": rounding is not None,
    }
    return arguments, sums


def _parts(fmt: Format, body: Tensor, numel: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """1-D views of a body as kernels read it: codes in units, bases, scale words."""
    if isinstance(fmt, BlockFormat):
        codes, bases, scales = fmt.split(body, numel)
        unit = _INTEGERS[coding(fmt).bits // 2]
        return codes.view(-1).view(unit), bases, scales.view(-1).view(_INTEGERS[scales.itemsize])
    elements = body.view(fmt.dtype)
    return _bits(elements), None, None


def _cast_alignment(fmt: Format, bodies: Sequence[Tensor]) -> int:
    """Bytes that the elements of cast bodies divide by: of what a thread moves at once, if all bodies do."""
    if isinstance(fmt, BlockFormat):
        return 1  # read in units of four codes, which need no more than a body's alignment
    at_once = _ELEMENTS_AT_ONCE * fmt.dtype.itemsize
    return at_once if all(body.data_ptr() % at_once == 0 for body in bodies) else 4


@overload
def _bits(tensor: Tensor) -> Tensor: ...


@overload
def _bits(tensor: None) -> None: ...


def _bits(tensor: Tensor | None) -> Tensor | None:
    """Half-width floats travel as integers."""
    if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.view(torch.int16)
    return tensor


def _value_dtype(values: Sequence[Tensor]) -> tl.dtype:
    return _VALUE_DTYPES[values[0].dtype] if values else tl.float32
