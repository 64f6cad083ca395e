"""Operations on awkward made-up ranges, by two back ends: what comes out has to be the same bits.

Runs in the process of the interpreter (`interpreter` in test_triton_interpreted.py); importing it imports no triton.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilocox_kernels.formats import Format
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.norms import Norms
from dilocox_kernels.reference import ReferenceBackend
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POISON = 7.0
"""In gaps: read, it would show in sums and codes; written, it would be gone."""


@dataclass(frozen=True)
class Case:
    """A range, what lies in it, and how it is worked on. Lengths of gaps are in blocks of the format."""

    fmt: Format
    pieces: tuple[tuple[int, int], ...]
    """(blocks of a gap, elements of the span after it)"""
    values: str = "bf16"
    residual: str | None = "bf16"
    anchored: bool = True
    rounding: Stochastic | None = None
    rule: Rule = Rule.NESTEROV
    local_weight: float = 0.0
    islands: int = 3
    exponent: int = 0
    """Numbers are about 2 to this power, blocks of them up to 2¹² apart."""
    value_offset: int = 0
    """Elements between the start of an allocation and the values in it."""
    body_offset: int = 128
    """Bytes between the start of an allocation and the body in it; a multiple of 4."""
    start: int = 0
    seed: int = 0
    peak: float | None = None
    """A value that stands among the others, now and then."""

    @property
    def spans(self) -> Spans:
        bounds, end = [], 0
        for gap, length in self.pieces:
            start = -(-end // self.fmt.alignment) * self.fmt.alignment + gap * self.fmt.alignment
            end = start + length
            bounds.append((start, end))
        return Spans(end + 3, tuple(bounds))


class Results(NamedTuple):
    """Tensors by name, whose bits count, and norms."""

    tensors: dict[str, Tensor]
    norms: tuple[Norms, ...] = ()
    checksum: int = 0


def check_equal(case: Case, operation: str) -> None:
    """Both back ends do `operation`; raises AssertionError where a bit differs."""
    from dilocox_kernels.gpu import TritonBackend

    run = {"encode": _encode, "requantise": _requantise, "decode": _decode, "outer_step": _outer_step}[operation]
    wanted = run(case, Kernels(ReferenceBackend()))
    got = run(case, Kernels(TritonBackend(torch.device("cpu"))))
    for name, tensor in wanted.tensors.items():
        differ = (_bits(got.tensors[name]) != _bits(tensor)).nonzero().flatten().tolist()
        assert not differ, f"{operation} {case}: {name} differs at {differ[:5]}, {len(differ)} places"
    assert got.checksum == wanted.checksum
    for ours, reference in zip(got.norms, wanted.norms, strict=True):
        assert ours.finite == reference.finite
        if reference.finite:
            assert ours.max_abs == reference.max_abs
            assert math.isclose(ours.sum_of_squares, reference.sum_of_squares, rel_tol=1e-6)


def check_not_finite(case: Case, position: int, bad: float) -> None:
    """A NaN or infinity at an element of a span is found."""
    for place in ("values", "residual"):
        tensors = _Tensors(case)
        target = tensors.values[0] if place == "values" else tensors.residual
        assert target is not None
        target[position] = bad
        from dilocox_kernels.gpu import TritonBackend

        norms = _encode(case, Kernels(TritonBackend(torch.device("cpu"))), tensors).norms[0]
        assert not norms.finite, place


class _Tensors:
    """The inputs of a case, the same each time."""

    def __init__(self, case: Case) -> None:
        self._random = torch.Generator().manual_seed(case.seed)
        self._case = case
        self._spans = case.spans
        self.anchor = self.flat()
        self.values = []
        for start, stop in self._spans.bounds:
            near = self.anchor[start:stop] + self.numbers(stop - start) / 8
            held = torch.zeros(case.value_offset + stop - start, dtype=DTYPES[case.values])
            held[case.value_offset :] = near.clamp(-6e4, 6e4) if case.values == "fp16" else near
            self.values.append(held[case.value_offset :])
            if case.peak is not None:
                self.values[-1][::61] = case.peak
        self.residual = None if case.residual is None else self.flat().to(DTYPES[case.residual])
        self.residual_out = None if self.residual is None else torch.full_like(self.residual, POISON)
        self.momentum = self.flat() if case.rule is not Rule.SGD else None

    def numbers(self, numel: int) -> Tensor:
        """Blocks of very different size; runs of ± 0, and numbers on the midpoints between levels."""
        sizes = torch.randint(-6, 7, (-(-numel // 32),), generator=self._random).repeat_interleave(32)[:numel]
        x = torch.randn(numel, generator=self._random) * torch.exp2(sizes + self._case.exponent)
        x[torch.rand(numel, generator=self._random) < 0.05] = -0.0
        x[numel // 2 : numel // 2 + 64] = 0.0
        halves = torch.randint(-15, 16, (min(64, numel),), generator=self._random) / 2
        x[: len(halves)] = halves * 2.0**self._case.exponent
        return x

    def flat(self) -> Tensor:
        flat = torch.full((self._spans.numel,), POISON)
        for place in self._spans.cut(flat):
            place.copy_(self.numbers(place.numel()))
        return flat

    def body(self) -> Tensor:
        """Room for a body, at the offset of the case."""
        numel = self._case.fmt.encoded_bytes(self._spans.numel)
        return torch.zeros(self._case.body_offset + numel, dtype=torch.uint8)[self._case.body_offset :]

    def bodies(self) -> list[Tensor]:
        """What islands sent: encoded by the reference."""
        bodies = []
        for _ in range(self._case.islands):
            body = self.body()
            values = self._spans.cut(self.flat())
            _encode_into(Kernels(ReferenceBackend()), replace(self._case, rounding=None), self, values, None, body)
            bodies.append(body)
        return bodies

    def weights(self) -> list[float]:
        return [1 / (k + 3) for k in range(self._case.islands)]


def _encode(case: Case, kernels: Kernels, tensors: _Tensors | None = None) -> Results:
    tensors = tensors or _Tensors(case)
    out = tensors.body()
    norms = _encode_into(kernels, case, tensors, tensors.values, tensors.anchor if case.anchored else None, out)
    return Results(_named(out=out, residual_out=tensors.residual_out), (norms,))


def _encode_into(
    kernels: Kernels, case: Case, tensors: _Tensors, values: list[Tensor], anchor: Tensor | None, out: Tensor
) -> Norms:
    return kernels.encode(
        case.fmt,
        values,
        case.spans,
        anchor=anchor,
        residual=tensors.residual,
        decay=0.9,
        rounding=case.rounding,
        start=case.start,
        out=out,
        residual_out=tensors.residual_out,
    )


def _requantise(case: Case, kernels: Kernels) -> Results:
    tensors = _Tensors(case)
    out = tensors.body()
    norms = kernels.requantise(
        case.fmt,
        tensors.bodies(),
        tensors.weights(),
        case.spans,
        residual=tensors.residual,
        decay=0.5,
        rounding=case.rounding,
        start=case.start,
        out=out,
        residual_out=tensors.residual_out,
    )
    return Results(_named(out=out, residual_out=tensors.residual_out), (norms,))


def _decode(case: Case, kernels: Kernels) -> Results:
    tensors = _Tensors(case)
    out = torch.full((case.spans.numel,), POISON)
    kernels.decode_accumulate(case.fmt, tensors.bodies(), tensors.weights(), case.spans, out)
    return Results({"out": out})


def _outer_step(case: Case, kernels: Kernels) -> Results:
    tensors = _Tensors(case)
    checksum = kernels.outer_step(
        case.fmt,
        tensors.bodies(),
        tensors.weights(),
        case.spans,
        anchor=tensors.anchor,
        momentum=tensors.momentum,
        values=tensors.values,
        rule=OuterRule(case.rule, 0.7, 0.0 if case.rule is Rule.SGD else 0.9),
        local_weight=case.local_weight,
        start=case.start,
    )
    values = {f"values[{index}]": value for index, value in enumerate(tensors.values)}
    return Results(_named(anchor=tensors.anchor, momentum=tensors.momentum) | values, checksum=checksum)


def _named(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.contiguous().view(torch.uint8)
