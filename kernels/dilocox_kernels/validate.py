"""Checks of the operations' arguments. All raise ValueError and name the argument, before anything is written."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dilocox_kernels.formats import CastFormat, Format
from dilocox_kernels.rules import MAX_ISLANDS, OuterRule, Stochastic
from dilocox_kernels.spans import Spans

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)


def check_values(values: Sequence[Tensor], spans: Spans, *, writes: bool) -> None:
    """One contiguous tensor a span, all of one dtype and device; if they are written, none may overlap another."""
    if len(values) != len(spans.bounds):
        raise ValueError(f"values: {len(values)} tensors for {len(spans.bounds)} spans; expected one a span")
    for index, (tensor, (start, stop)) in enumerate(zip(values, spans.bounds, strict=True)):
        _check_flat(f"values[{index}]", tensor, stop - start, VALUE_DTYPES)
        _check_alike(f"values[{index}]", tensor, "values[0]", values[0])
    if writes:
        _refuse_overlaps([(f"values[{index}]", tensor) for index, tensor in enumerate(values)])


def check_codec(
    fmt: Format,
    spans: Spans,
    rounding: Stochastic | None,
    start: int,
    out: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    *,
    anchor: Tensor | None,
    values: Sequence[Tensor],
    bodies: Sequence[Tensor],
) -> None:
    """What is encoded, and where to."""
    _check_spans(fmt, spans)
    _check_start(start)
    if rounding is not None and isinstance(fmt, CastFormat):
        raise ValueError(f"rounding: {fmt.name} has no stochastic rounding; pass None")
    if rounding is not None and start % 4:
        raise ValueError(f"start: {start}; with stochastic rounding expected a multiple of 4")
    _check_body("out", fmt, out, spans.numel)
    flats = [("residual", residual), ("residual_out", residual_out)]
    for name, tensor in flats:
        if tensor is not None:
            _check_flat(name, tensor, spans.numel, RESIDUAL_DTYPES)
    if residual is not None and residual_out is not None and residual.dtype != residual_out.dtype:
        raise ValueError(f"residual_out: {residual_out.dtype}, but residual is {residual.dtype}; expected the same")
    if anchor is not None:
        _check_flat("anchor", anchor, spans.numel, (torch.float32,))
    read = [("anchor", anchor), ("residual", residual)]
    read += [(f"values[{index}]", tensor) for index, tensor in enumerate(values)]
    read += [(f"bodies[{index}]", tensor) for index, tensor in enumerate(bodies)]
    written = [("out", out), ("residual_out", residual_out)]
    _check_separate(written, read)


def check_merge(
    fmt: Format, bodies: Sequence[Tensor], weights: Sequence[float], spans: Spans, out: Tensor | None
) -> None:
    """What is decoded and summed, and where to, if it is written out."""
    _check_spans(fmt, spans)
    if not 1 <= len(bodies) <= MAX_ISLANDS:
        raise ValueError(f"bodies: {len(bodies)} of them; expected 1 to {MAX_ISLANDS}")
    if len(weights) != len(bodies):
        raise ValueError(f"weights: {len(weights)} of them for {len(bodies)} bodies; expected one a body")
    for index, weight in enumerate(weights):
        if not math.isfinite(weight):
            raise ValueError(f"weights[{index}]: {weight}; expected a finite number")
    for index, body in enumerate(bodies):
        _check_body(f"bodies[{index}]", fmt, body, spans.numel)
    if out is not None:
        _check_flat("out", out, spans.numel, (torch.float32,))
        _check_separate([("out", out)], [(f"bodies[{index}]", body) for index, body in enumerate(bodies)])


def check_step(
    spans: Spans,
    bodies: Sequence[Tensor],
    anchor: Tensor,
    momentum: Tensor | None,
    values: Sequence[Tensor],
    rule: OuterRule,
    local_weight: float,
    start: int,
) -> None:
    """What an outer step changes."""
    _check_start(start)
    if not 0 <= local_weight < 1:
        raise ValueError(f"local_weight: {local_weight}; expected a number from 0 (overwrite) to below 1")
    if rule.needs_momentum != (momentum is not None):
        needed = "needs a buffer" if rule.needs_momentum else "has no buffer; pass None"
        raise ValueError(f"momentum: {rule.kind.name.lower()} {needed}")
    _check_flat("anchor", anchor, spans.numel, (torch.float32,))
    if momentum is not None:
        _check_flat("momentum", momentum, spans.numel, (torch.float32,))
    written = [("anchor", anchor), ("momentum", momentum)]
    written += [(f"values[{index}]", tensor) for index, tensor in enumerate(values)]
    _check_separate(written, [(f"bodies[{index}]", body) for index, body in enumerate(bodies)])


def _check_start(start: int) -> None:
    if not 0 <= start < 1 << 62:
        raise ValueError(f"start: {start}; expected the position of the range's first element")


def _check_spans(fmt: Format, spans: Spans) -> None:
    for start, stop in spans.bounds:
        if start % fmt.alignment:
            raise ValueError(
                f"spans: [{start}, {stop}) does not start at a multiple of {fmt.alignment}, a block of {fmt.name}"
            )
    for (_, stop), (start, _) in zip(spans.bounds, spans.bounds[1:], strict=False):
        if -(-stop // fmt.alignment) * fmt.alignment > start:
            raise ValueError(f"spans: those that end at {stop} and start at {start} share a block of {fmt.name}")


def _check_flat(name: str, tensor: Tensor, numel: int, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(f"{name}: shape {list(tensor.shape)}; expected [{numel}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: not contiguous (strides {tensor.stride()}); pass {name}.contiguous()")


def _check_body(name: str, fmt: Format, body: Tensor, numel: int) -> None:
    expected = fmt.encoded_bytes(numel)
    if body.dtype == torch.uint8 and body.dim() == 1 and body.numel() != expected:
        raise ValueError(f"{name}: {body.numel()} bytes; {numel} elements in {fmt.name} take {expected}")
    _check_flat(name, body, expected, (torch.uint8,))
    if body.data_ptr() % 4:
        raise ValueError(f"{name}: starts at an address that is not a multiple of 4; align it to 4 bytes")


def _check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name}: on {tensor.device}, but {other_name} is on {other.device}; expected one device")
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: {tensor.dtype}, but {other_name} is {other.dtype}; expected one dtype")


def _check_separate(written: Iterable[tuple[str, Tensor | None]], read: Iterable[tuple[str, Tensor | None]]) -> None:
    """All on one device, and no buffer that is written overlaps any other."""
    targets = [(name, tensor) for name, tensor in written if tensor is not None]
    sources = [(name, tensor) for name, tensor in read if tensor is not None]
    first_name, first = targets[0]
    for name, tensor in (*targets, *sources):
        if tensor.device != first.device:
            raise ValueError(f"{name}: on {tensor.device}, but {first_name} is on {first.device}; expected one device")
    _refuse_overlaps(targets, sources)


def _refuse_overlaps(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]] = ()) -> None:
    """Sorted by address, only neighbours can overlap: no buffer may start before the written ones below it end."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name, writes)
        for group, writes in ((written, True), (read, False))
        for name, tensor in group
        if tensor.numel()
    )
    end_of = {True: (0, ""), False: (0, "")}  # the furthest end of written and of read buffers so far
    for low, high, name, writes in ranges:
        for other_writes, (end, other) in end_of.items():
            if low < end and (writes or other_writes):
                raise ValueError(
                    f"{name}: overlaps {other} in memory, and one of them is written; pass separate buffers"
                )
        end_of[writes] = max(end_of[writes], (high, name))
