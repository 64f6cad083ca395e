"""Ranges of all kinds for the CPU back end, and what an operation makes of them, bit by bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels.cpu import CpuBackend
from dilocox_kernels.formats import CODES, GROUP_ELEMENTS, SCALE_DTYPES, BlockFormat, CastFormat, Format
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.norms import Norms
from dilocox_kernels.reference import ReferenceBackend
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans
from tests.kernels import oracle
from tests.kernels.cases import BLOCK_FORMATS

OPERATIONS = ("encode", "requantise", "decode", "outer_step")
REFERENCE = Kernels(ReferenceBackend())
SENTINEL = 7.25
"""What buffers hold where nothing may be written."""
GUARD = 67
"""Elements before and after each buffer, unless a case says otherwise; odd: buffers start at no round address."""


def on_level(level: str) -> Kernels:
    """The back end on a level of instructions of this processor, one of CpuBackend.levels()."""
    return Kernels(CpuBackend(level))


@dataclass(frozen=True)
class Case:
    """A range and how it is worked on."""

    fmt: Format
    spans: Spans
    values_dtype: torch.dtype = torch.bfloat16
    residual_dtype: torch.dtype | None = torch.bfloat16
    anchored: bool = True
    rounding: Stochastic | None = None
    start: int = 0
    islands: int = 2
    rule: Rule = Rule.NESTEROV
    local_weight: float = 0.0
    magnitude: float = 1e-3
    seed: int = 0
    guard: int = GUARD


class Outcome(NamedTuple):
    """Of an operation: whole buffers with their guards, as bytes, and numbers."""

    buffers: dict[str, bytes]
    norms: Norms | None = None
    checksum: int | None = None


class Buffers:
    """A case's tensors, the same each time, each between guards of its own; gaps hold NaN where they are only read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.held: dict[str, Tensor] = {}
        self._random = np.random.default_rng(case.seed)
        numel, spans = case.spans.numel, case.spans
        self.anchor = self._hold("anchor", self._flat())
        self.momentum = self._hold("momentum", self._flat())
        finite = torch.finfo(case.values_dtype).max
        self.values = [
            self._hold(f"values[{index}]", part.clamp(-finite, finite).to(case.values_dtype))
            for index, part in enumerate(spans.cut(self._flat()))
        ]
        self.residual = self.kept = None
        if case.residual_dtype is not None:
            largest = torch.finfo(case.residual_dtype).max
            owed = (self._flat() * 0.3).clamp(-largest, largest)
            self.residual = self._hold("residual", owed.to(case.residual_dtype))
            self.kept = self._hold("kept", torch.full((numel,), SENTINEL).to(case.residual_dtype))
        self.out = self._hold("out", torch.full((case.fmt.encoded_bytes(numel),), 0xAA, dtype=torch.uint8), guard=68)
        self.merged = self._hold("merged", torch.full((numel,), SENTINEL))
        self.weights = self._random.uniform(-1, 1, case.islands).tolist()

    def bodies(self) -> list[Tensor]:
        bodies = []
        for island in range(self.case.islands):
            empty = torch.zeros(self.case.fmt.encoded_bytes(self.case.spans.numel), dtype=torch.uint8)
            body = self._hold(f"bodies[{island}]", empty, guard=68)
            values = self.case.spans.cut(self._flat() * 0.1)
            REFERENCE.encode(
                self.case.fmt,
                values,
                self.case.spans,
                anchor=None,
                residual=None,
                decay=1.0,
                rounding=None,
                start=0,
                out=body,
                residual_out=None,
            )
            bodies.append(body)
        return bodies

    def outcome(self, norms: Norms | None = None, checksum: int | None = None) -> Outcome:
        buffers = {name: whole.view(torch.uint8).numpy().tobytes() for name, whole in self.held.items()}
        return Outcome(buffers, norms, checksum)

    def _hold(self, name: str, tensor: Tensor, guard: int | None = None) -> Tensor:
        guard = self.case.guard if guard is None else guard
        whole = torch.full((guard + tensor.numel() + guard,), SENTINEL).to(tensor.dtype)
        whole[guard : guard + tensor.numel()] = tensor
        self.held[name] = whole
        return whole[guard : guard + tensor.numel()]

    def _flat(self) -> Tensor:
        """Blocks of different sizes, zeros of both signs, values on the midpoints of levels, and awkward ones."""
        flat = torch.full((self.case.spans.numel,), torch.nan)
        for place in self.case.spans.cut(flat):
            numel = place.numel()
            sizes = np.exp2(self._random.integers(-6, 7, -(-numel // 32)).repeat(32)[:numel])
            values = self._random.standard_normal(numel) * sizes * self.case.magnitude
            values[:40] = self._random.integers(-28, 29, numel)[:40] / 4 * self.case.magnitude
            values[self._random.random(numel) < 0.05] = -0.0
            if numel > 200:
                values[64:128] = 0
                values[130 + int(self._random.integers(0, 60))] = self._random.choice(oracle.AWKWARD) / 4
            limit = oracle.FLOAT32_MAX / 8
            place.copy_(torch.from_numpy(values.clip(-limit, limit).astype(np.float32)))
        return flat


def run(kernels: Kernels, case: Case, operation: str) -> Outcome:
    """All that an operation leaves behind."""
    use = Buffers(case)
    fmt, spans = case.fmt, case.spans
    if operation == "encode":
        anchor = use.anchor if case.anchored else None
        norms = kernels.encode(
            fmt,
            use.values,
            spans,
            anchor=anchor,
            residual=use.residual,
            decay=0.9,
            rounding=case.rounding,
            start=case.start,
            out=use.out,
            residual_out=use.kept,
        )
        return use.outcome(norms)
    bodies = use.bodies()
    if operation == "requantise":
        norms = kernels.requantise(
            fmt,
            bodies,
            use.weights,
            spans,
            residual=use.residual,
            decay=0.9,
            rounding=case.rounding,
            start=case.start,
            out=use.out,
            residual_out=use.kept,
        )
        return use.outcome(norms)
    if operation == "decode":
        kernels.decode_accumulate(fmt, bodies, use.weights, spans, use.merged)
        return use.outcome()
    checksum = kernels.outer_step(
        fmt,
        bodies,
        use.weights,
        spans,
        anchor=use.anchor,
        momentum=None if case.rule is Rule.SGD else use.momentum,
        values=use.values,
        rule=OuterRule(case.rule, 0.7, 0.0 if case.rule is Rule.SGD else 0.9),
        local_weight=case.local_weight,
        start=case.start,
    )
    return use.outcome(checksum=checksum)


def check_equal(case: Case, kernels: Kernels, operations: Sequence[str] = OPERATIONS) -> None:
    """`kernels` leaves the same bits everywhere as the reference does, in guards and gaps too."""
    for operation in operations:
        wanted, got = run(REFERENCE, case, operation), run(kernels, case, operation)
        differing = [name for name, content in wanted.buffers.items() if got.buffers[name] != content]
        assert not differing, f"{operation} of {case}: {differing} differ"
        assert got.checksum == wanted.checksum, f"{operation} of {case}"
        if wanted.norms is not None and got.norms is not None:
            assert got.norms.finite == wanted.norms.finite, f"{operation} of {case}"
            if wanted.norms.finite:
                assert got.norms.max_abs == wanted.norms.max_abs
                scale = wanted.norms.sum_of_squares
                assert abs(got.norms.sum_of_squares - scale) <= 1e-9 * scale


@st.composite
def spans_of(draw: st.DrawFn, alignment: int, max_numel: int) -> Spans:
    """Spans of odd lengths, many of them tiny, with gaps between some."""
    numel = draw(st.integers(1, max_numel))
    lengths = st.one_of(st.integers(1, 5), st.integers(1, 2 * alignment), st.integers(1, max_numel))
    bounds, start = [], draw(st.sampled_from([0, 0, alignment]))
    while start < numel and len(bounds) < 40:
        stop = min(start + draw(lengths), numel)
        bounds.append((start, stop))
        start = (-(-stop // alignment) + draw(st.sampled_from([0, 0, 1, 3]))) * alignment
    return Spans(numel, tuple(bounds))


@st.composite
def cases(draw: st.DrawFn, max_numel: int = 3 * GROUP_ELEMENTS) -> Case:
    fmt = draw(st.one_of(BLOCK_FORMATS, st.sampled_from([CastFormat("fp32"), CastFormat("bf16")])))
    rounding = None
    if isinstance(fmt, BlockFormat) and draw(st.booleans()):
        rounding = Stochastic(draw(st.integers(0, (1 << 64) - 1)), draw(st.integers(0, (1 << 32) - 1)))
    return Case(
        fmt=fmt,
        spans=draw(spans_of(fmt.alignment, max_numel)),
        values_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        residual_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        anchored=draw(st.booleans()),
        rounding=rounding,
        start=4 * draw(st.sampled_from([0, 1, GROUP_ELEMENTS, (1 << 29) - 1, (1 << 30) - 900, 1 << 40])),
        islands=draw(st.integers(1, 5)),
        rule=draw(st.sampled_from(Rule)),
        local_weight=draw(st.sampled_from([0.0, 0.3])),
        magnitude=10.0 ** draw(st.integers(-45, 36)),
        seed=draw(st.integers(0, 1 << 32)),
    )


ALL_SCALES = tuple(SCALE_DTYPES)
ALL_CODES = tuple(CODES)
