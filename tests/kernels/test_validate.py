"""Arguments that must be refused, by name, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilocox_kernels.backend import BackendError
from dilocox_kernels.formats import BlockFormat
from dilocox_kernels.kernels import select
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans

FMT = BlockFormat("int4", 32, "fp16")
N = 100
SPANS = Spans(N, ((0, 40), (64, 100)))
BYTES = FMT.encoded_bytes(N)
OTHER = torch.float64


def encode_arguments() -> dict[str, Any]:
    return {
        "values": [torch.ones(40), torch.ones(36)],
        "spans": SPANS,
        "anchor": torch.zeros(N),
        "residual": torch.zeros(N),
        "decay": 1.0,
        "rounding": None,
        "start": 0,
        "out": torch.full((BYTES,), 0xAA, dtype=torch.uint8),
        "residual_out": torch.full((N,), 7.0),
    }


def step_arguments() -> dict[str, Any]:
    return {
        "bodies": [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)],
        "weights": [0.5, 0.5],
        "spans": SPANS,
        "anchor": torch.full((N,), 7.0),
        "momentum": torch.full((N,), 7.0),
        "values": [torch.full((40,), 7.0), torch.full((36,), 7.0)],
        "rule": OuterRule(Rule.NESTEROV, 0.7, 0.9),
        "local_weight": 0.0,
        "start": 0,
    }


def _share_residual(a: dict[str, Any]) -> None:
    a["residual_out"] = a["residual"]


def _overlap_values(a: dict[str, Any]) -> None:
    flat = torch.full((60,), 7.0)
    a["values"] = [flat[:40], flat[24:]]


def _values_in_anchor(a: dict[str, Any]) -> None:
    a["values"] = [a["anchor"][:40], a["values"][1]]


WRONG_ENCODE: list[tuple[str, dict[str, Any] | Callable[[dict[str, Any]], None]]] = [
    (r"values: 1 tensors for 2 spans", {"values": [torch.ones(40)]}),
    (r"values\[1\]: shape \[35\]; expected \[36\]", {"values": [torch.ones(40), torch.ones(35)]}),
    (r"values\[0\]: torch.float64", {"values": [torch.ones(40, dtype=OTHER), torch.ones(36, dtype=OTHER)]}),
    (r"values\[1\]: torch.bfloat16", {"values": [torch.ones(40), torch.ones(36, dtype=torch.bfloat16)]}),
    (r"values\[0\]: not contiguous", {"values": [torch.ones(80)[::2], torch.ones(36)]}),
    (r"values\[1\]: on meta", {"values": [torch.ones(40), torch.ones(36, device="meta")]}),
    (r"anchor: torch.bfloat16", {"anchor": torch.zeros(N, dtype=torch.bfloat16)}),
    (r"anchor: shape \[10, 10\]", {"anchor": torch.zeros(10, 10)}),
    (r"residual: torch.float16", {"residual": torch.zeros(N, dtype=torch.float16)}),
    (r"residual_out: torch.bfloat16, but residual", {"residual_out": torch.zeros(N, dtype=torch.bfloat16)}),
    (r"residual_out: shape \[99\]", {"residual_out": torch.zeros(99)}),
    (r"out: 71 bytes", {"out": torch.zeros(71, dtype=torch.uint8)}),
    (r"out: torch.int8", {"out": torch.zeros(BYTES, dtype=torch.int8)}),
    (r"out: starts at an address", {"out": torch.zeros(BYTES + 1, dtype=torch.uint8)[1:]}),
    (r"residual(_out)?: overlaps residual", _share_residual),
    (r"start: -4", {"start": -4}),
    (r"start: 6; with stochastic", {"start": 6, "rounding": Stochastic(1, 1)}),
    (r"spans: \[16, 56\) does not start at a multiple of 32", {"spans": Spans(N, ((16, 56), (64, 100)))}),
]
WRONG_STEP: list[tuple[str, dict[str, Any] | Callable[[dict[str, Any]], None]]] = [
    (r"bodies: 0 of them", {"bodies": [], "weights": []}),
    (r"bodies: 33 of them", {"bodies": [torch.zeros(BYTES, dtype=torch.uint8)] * 33, "weights": [0.1] * 33}),
    (r"weights: 1 of them for 2 bodies", {"weights": [1.0]}),
    (r"weights\[1\]: nan", {"weights": [0.5, float("nan")]}),
    (r"bodies\[1\]: 70 bytes", {"bodies": [torch.zeros(BYTES, dtype=torch.uint8), torch.zeros(70, dtype=torch.uint8)]}),
    (r"momentum: nesterov needs a buffer", {"momentum": None}),
    (r"momentum: sgd has no buffer", {"rule": OuterRule(Rule.SGD, 0.7, 0.0)}),
    (r"local_weight: 1.0", {"local_weight": 1.0}),
    (r"anchor: torch.float64", {"anchor": torch.zeros(N, dtype=OTHER)}),
    (r"values\[1\]: overlaps values\[0\]", _overlap_values),
    (r"(values\[0\]|anchor): overlaps (anchor|values\[0\])", _values_in_anchor),
]


def changed(arguments: dict[str, Any], change: dict[str, Any] | Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if callable(change):
        change(arguments)
        return arguments
    return arguments | change


@pytest.mark.parametrize(("message", "change"), WRONG_ENCODE, ids=[message for message, _ in WRONG_ENCODE])
def test_encode_refuses(message: str, change: Any) -> None:
    arguments = changed(encode_arguments(), change)
    before = [arguments["out"].clone(), arguments["residual_out"].clone()]
    with pytest.raises(ValueError, match=message):
        select("cpu", "cpu").encode(FMT, **arguments)
    assert torch.equal(arguments["out"], before[0])
    assert torch.equal(arguments["residual_out"], before[1])


@pytest.mark.parametrize(("message", "change"), WRONG_STEP, ids=[message for message, _ in WRONG_STEP])
def test_outer_step_refuses(message: str, change: Any) -> None:
    arguments = changed(step_arguments(), change)
    written = [arguments["anchor"], *arguments["values"]]
    before = [tensor.clone() for tensor in written]
    with pytest.raises(ValueError, match=message):
        select("cpu", "cpu").outer_step(FMT, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(written, before, strict=True))


@pytest.mark.parametrize("bounds", [((0, 0),), ((0, 200),), ((0, 50), (40, 60)), ((64, 100), (0, 10)), ((-1, 5),)])
def test_spans_that_cannot_be_are_refused(bounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="spans"):
        Spans(N, bounds)


def test_two_spans_in_one_block_are_refused() -> None:
    arguments = encode_arguments() | {"spans": Spans(N, ((0, 40), (64, 100)))}
    with pytest.raises(ValueError, match="spans"):
        select("cpu", "cpu").encode(BlockFormat("int4", 256, "fp16"), **arguments)


@pytest.mark.parametrize(("key", "round_number"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 1 << 32)])
def test_keys_that_do_not_fit_are_refused(key: int, round_number: int) -> None:
    with pytest.raises(ValueError, match="unsigned"):
        Stochastic(key, round_number)


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [("cpu", "cuda", "host memory"), ("auto", "meta", "choose kernels=reference"), ("fast", "cpu", "expected one of")],
)
def test_a_back_end_that_cannot_be_had_is_refused(name: str, device_type: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        select(name, device_type)
