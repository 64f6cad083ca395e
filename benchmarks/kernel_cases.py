"""What is measured of the kernels: operations, formats and settings, the bytes that each must move, and its work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import in_words
from dilocox_kernels.formats import BlockFormat
from dilocox_kernels.kernels import Kernels, select
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans

OPERATIONS = ("encode", "decode_accumulate", "requantise", "outer_step")
ENCODES = ("encode", "requantise")
CODES = ("int8", "int4", "e2m1", "e3m0", "bins2")
SCALES = ("fp16", "e4m4")
BLOCK_SIZE = 64
ROUNDINGS = ("nearest", "stochastic")
BODIES = (2, 4, 8)
DEFAULT_BODIES = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Of the local weights and the residual: what is usual on a GPU, and what the main job has on a CPU."""
HOLDS = {"encode": "weights and residual", "requantise": "residual", "outer_step": "weights"}
"""What of an operation is of such a dtype."""
FP32_BYTES = 4
PATTERN_ELEMENTS = 1 << 20
"""Buffers repeat random numbers after so many elements: they are made in no time, and no kernel can tell."""
PLAIN: Any = {"anchor": None, "residual": None, "decay": 1.0, "rounding": None, "start": 0, "residual_out": None}
"""Of `encode`: a Δ without error feedback, to nearest."""
STEP = OuterRule(Rule.NESTEROV, lr=0.7, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One operation in one setting; `rounding`, `dtype` and `bodies` are those of this operation or None."""

    operation: str
    elements: int
    code: str
    scale: str
    rounding: str | None = None
    dtype: str | None = None
    bodies: int | None = None

    @property
    def format(self) -> BlockFormat:
        return BlockFormat(self.code, BLOCK_SIZE, self.scale)

    @property
    def parameters(self) -> dict[str, object]:
        """Of a record; the same keys for all cases of an operation."""
        optional = {"rounding": self.rounding, HOLDS.get(self.operation, ""): self.dtype, "K": self.bodies}
        return {
            "elements": in_words(self.elements),
            "format": self.code,
            "scales": self.scale,
            **{name: value for name, value in optional.items() if value is not None},
        }


def usual(operation: str, elements: int, code: str, scale: str) -> Case:
    """An operation as the targets are for: to nearest, bf16 weights and residual, four bodies."""
    return Case(
        operation,
        elements,
        code,
        scale,
        rounding="nearest" if operation in ENCODES else None,
        dtype=None if operation == "decode_accumulate" else "bf16",
        bodies=None if operation == "encode" else DEFAULT_BODIES,
    )


def bytes_moved(case: Case) -> int:
    """Bytes that an operation must read and write when each moves once.

    With n elements, w bytes a local weight, r bytes a residual, an fp32 anchor, momentum and merge, and bodies of
    b = `encoded_bytes(n)`:

    - encode: n (w + 4 + 2r) + b — reads weights, anchor, residual; writes residual and body;
    - decode_accumulate: K b + 4n — reads K bodies, writes the merge;
    - requantise: K b + 2 r n + b — reads K bodies and the residual; writes residual and body;
    - outer_step: K b + n (8 + 8 + w) — reads K bodies; reads and writes anchor and momentum; writes the weights.
    """
    n, body = case.elements, case.format.encoded_bytes(case.elements)
    wide = DTYPES[case.dtype].itemsize if case.dtype else 0
    received = (case.bodies or 0) * body
    if case.operation == "encode":
        return n * (wide + FP32_BYTES + 2 * wide) + body
    if case.operation == "decode_accumulate":
        return received + FP32_BYTES * n
    if case.operation == "requantise":
        return received + 2 * wide * n + body
    assert case.operation == "outer_step"
    return received + n * (4 * FP32_BYTES + wide)


def bytes_held(case: Case) -> int:
    """Of the buffers of a case: what it moves, but anchor and momentum of an outer step move twice."""
    twice = 2 * FP32_BYTES * case.elements if case.operation == "outer_step" else 0
    return bytes_moved(case) - twice


def grid(sizes: Sequence[int]) -> list[Case]:
    """All cases: every format at every size, and at the largest size also fp32 weights and residuals and other K."""
    cases = []
    for elements in sorted(sizes):
        largest = elements == max(sizes)
        for operation in OPERATIONS:
            for code in CODES:
                for scale in SCALES:
                    cases += _settings(usual(operation, elements, code, scale), everything=largest)
    return cases


def _settings(case: Case, *, everything: bool) -> list[Case]:
    dtypes = tuple(DTYPES) if everything and case.dtype else (case.dtype,)
    bodies = BODIES if everything and case.operation in ("decode_accumulate", "outer_step") else (case.bodies,)
    return [
        replace(case, rounding=rounding, dtype=dtype, bodies=count)
        for rounding in (ROUNDINGS if case.operation in ENCODES else (None,))
        for dtype in dtypes
        for count in bodies
    ]


class Buffers:
    """The tensors of the cases of one operation, size and dtype; only what the operation needs, all of it touched."""

    def __init__(self, case: Case, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(case.elements)
        self.device = device
        self._elements = case.elements
        self._pattern = min(case.elements, PATTERN_ELEMENTS)
        dtype = DTYPES[case.dtype or "fp32"]
        empty = torch.empty(0, device=device)
        self.spans = Spans.whole(case.elements)
        start, moved = (torch.randn(self._pattern, generator=generator) * size for size in (2e-2, 1e-3))
        holds_weights = case.operation in ("encode", "outer_step")
        holds_residual = case.operation in ("encode", "requantise")
        self.anchor = self._filled(start) if holds_weights else empty
        self.values = self._filled((start - moved).to(dtype)) if holds_weights else empty
        self.momentum = self._filled(moved) if case.operation == "outer_step" else empty
        self.residual = self._filled((moved / 8).to(dtype)) if holds_residual else empty
        self.residual_out = torch.zeros_like(self.residual)
        self.merged = self._filled(moved) if case.operation == "decode_accumulate" else empty
        self._delta = moved

    def _filled(self, pattern: Tensor) -> Tensor:
        return pattern.repeat(self._elements // self._pattern).to(self.device)

    def bodies(self, kernels: Kernels, case: Case) -> list[Tensor]:
        """`case.bodies` bodies of the case's format, the first written by encode, each in memory of its own."""
        first = torch.zeros(case.format.encoded_bytes(case.elements), dtype=torch.uint8, device=self.device)
        delta = self._filled(self._delta)
        kernels.encode(case.format, [delta], self.spans, **PLAIN, out=first)
        return [first, *(first.clone() for _ in range(1, case.bodies or 1))]


def work_of(kernels: Kernels, case: Case, buffers: Buffers) -> Callable[[], object]:
    """The call that is timed: the front with its checks, and the back end."""
    fmt, spans, values = case.format, buffers.spans, [buffers.values]
    bodies = buffers.bodies(kernels, case)
    weights = [1 / len(bodies)] * len(bodies)
    if case.operation == "decode_accumulate":
        return partial(kernels.decode_accumulate, fmt, bodies, weights, spans, buffers.merged)
    if case.operation == "outer_step":
        return partial(
            kernels.outer_step,
            *(fmt, bodies, weights, spans),
            anchor=buffers.anchor,
            momentum=buffers.momentum,
            values=values,
            rule=STEP,
            local_weight=0.0,
            start=0,
        )
    encode = (
        partial(kernels.encode, fmt, values, spans, anchor=buffers.anchor)
        if case.operation == "encode"
        else partial(kernels.requantise, fmt, bodies, weights, spans)
    )
    return partial(
        encode,
        residual=buffers.residual,
        decay=1.0,
        rounding=Stochastic(key=1, round=1) if case.rounding == "stochastic" else None,
        start=0,
        out=torch.zeros_like(bodies[0]),
        residual_out=buffers.residual_out,
    )


def select_kernels(device: torch.device) -> Kernels:
    """The back end that is measured: the compiled one of the device; raises where it cannot be had."""
    return select("auto", device.type)
