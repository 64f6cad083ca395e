"""The kernels benchmark: its byte model counts real buffers, its peers do the same work, and its errors are right."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_peers, roofline
from benchmarks.contract import Record
from benchmarks.kernel_cases import (
    BODIES,
    CODES,
    OPERATIONS,
    SCALES,
    STEP,
    Buffers,
    Case,
    bytes_held,
    bytes_moved,
    grid,
    usual,
    work_of,
)
from benchmarks.kernel_memory import peak_growth
from benchmarks.kernel_targets import EXTRA_MEMORY, OVER_COPY, target_records
from benchmarks.kernels import COPY, MEMORY, OURS, PEERS, check_fits
from benchmarks.quality import FED_BACK, ONE_ENCODE, feedback_error, gaussian, heavy_tailed, quality_records
from benchmarks.timing import COPY_BYTES_AT_MOST, Copy, in_words, parse_elements, take_turns
from dilocox_kernels.kernels import Kernels, select
from dilocox_kernels.spans import Spans

CPU = torch.device("cpu")
ELEMENTS = 1 << 13


@pytest.fixture(scope="module")
def reference() -> Kernels:
    return select("reference", "cpu")


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("case", grid([ELEMENTS]), ids=lambda c: " ".join(map(str, c.parameters.values())))
def test_the_byte_model_counts_the_buffers(case: Case) -> None:
    b = Buffers(case, CPU)
    body = [torch.empty(case.format.encoded_bytes(ELEMENTS), dtype=torch.uint8)]
    received = body * (case.bodies or 0)
    read, written = {
        "encode": ([b.values, b.anchor, b.residual], [b.residual_out, *body]),
        "decode_accumulate": (received, [b.merged]),
        "requantise": ([*received, b.residual], [b.residual_out, *body]),
        "outer_step": ([*received, b.anchor, b.momentum], [b.anchor, b.momentum, b.values]),
    }[case.operation]
    assert bytes_moved(case) == storage_bytes(read) + storage_bytes(written)
    held = [*received, b.values, b.anchor, b.momentum, b.residual, b.residual_out, b.merged]
    held += body if case.operation in ("encode", "requantise") else []
    assert bytes_held(case) == storage_bytes(held)


def test_bytes_an_element_of_the_usual_int4() -> None:
    moved = {name: bytes_moved(usual(name, ELEMENTS, "int4", "fp16")) / ELEMENTS for name in OPERATIONS}
    body = 4.25 / 8
    assert moved["encode"] == 2 + 4 + 2 + 2 + body
    assert moved["decode_accumulate"] == 4 * body + 4
    assert moved["requantise"] == 4 * body + 4 + body
    assert moved["outer_step"] == 4 * body + 16 + 2


def test_every_work_runs_and_writes(reference: Kernels) -> None:
    for case in grid([ELEMENTS]):
        buffers = Buffers(case, CPU)
        targets = [buffers.residual_out, buffers.merged, buffers.anchor]
        before = [target.clone() for target in targets]
        work_of(reference, case, buffers)()
        assert not all(map(torch.equal, targets, before)), case


def test_the_grid_has_every_format_at_every_size_and_all_settings_at_the_largest() -> None:
    cases = grid([1 << 20, 1 << 14])
    assert len(set(cases)) == len(cases)
    for elements in (1 << 14, 1 << 20):
        here = {(c.operation, c.code, c.scale) for c in cases if c.elements == elements}
        assert here == {(name, code, scale) for name in OPERATIONS for code in CODES for scale in SCALES}
    outer = [c for c in cases if c.operation == "outer_step"]
    assert {(c.bodies, c.dtype) for c in outer if c.elements == 1 << 20} == {
        (count, dtype) for count in BODIES for dtype in ("bf16", "fp32")
    }
    assert {(c.bodies, c.dtype) for c in outer if c.elements == 1 << 14} == {(4, "bf16")}
    assert {c.rounding for c in cases if c.operation == "encode"} == {"nearest", "stochastic"}


def test_cases_of_one_operation_differ_in_their_parameters() -> None:
    for name in OPERATIONS:
        parameters = [case.parameters for case in grid([1 << 20, 1 << 21]) if case.operation == name]
        assert len({tuple(each.values()) for each in parameters}) == len(parameters)
        assert len({tuple(each) for each in parameters}) == 1


def test_eager_encode_writes_what_the_reference_decodes(reference: Kernels) -> None:
    case = usual("encode", ELEMENTS, "int4", "fp16")
    b = Buffers(case, CPU)
    codes, scales = kernel_peers.encode(b.anchor, b.values, b.residual, b.residual_out)
    body = torch.cat([codes.view(-1), scales.view(-1).view(torch.uint8)])
    decoded = torch.empty(ELEMENTS)
    reference.decode_accumulate(case.format, [body], [1.0], Spans.whole(ELEMENTS), decoded)
    wanted = b.anchor - b.values + b.residual
    assert (decoded - wanted).abs().max() < 0.6 * scales.max()
    torch.testing.assert_close(decoded + b.residual_out, wanted, rtol=0, atol=1e-2 * scales.max().item())
    ours = Buffers(case, CPU)
    work_of(reference, case, ours)()
    torch.testing.assert_close(b.residual_out, ours.residual_out, rtol=0, atol=1.01 * scales.max().item())


def test_eager_decode_and_outer_step_do_what_the_reference_does(reference: Kernels) -> None:
    merge, step = (usual(name, ELEMENTS, "int4", "fp16") for name in ("decode_accumulate", "outer_step"))
    ours, theirs = Buffers(step, CPU), Buffers(step, CPU)
    bodies = ours.bodies(reference, step)
    for index, body in enumerate(bodies):  # four different ones
        body[: ELEMENTS // 2] = body[: ELEMENTS // 2].roll(index)
    weights = [0.25] * len(bodies)
    merged = Buffers(merge, CPU)
    kernel_peers.torch_works(merge, merged, bodies)[kernel_peers.EAGER]()
    expected = torch.empty(ELEMENTS)
    reference.decode_accumulate(merge.format, bodies, weights, ours.spans, expected)
    torch.testing.assert_close(merged.merged, expected)
    kernel_peers.torch_works(step, theirs, bodies)[kernel_peers.EAGER]()
    reference.outer_step(
        *(step.format, bodies, weights, ours.spans),
        anchor=ours.anchor,
        momentum=ours.momentum,
        values=[ours.values],
        rule=STEP,
        local_weight=0.0,
        start=0,
    )
    torch.testing.assert_close(theirs.anchor, ours.anchor)
    torch.testing.assert_close(theirs.momentum, ours.momentum)
    torch.testing.assert_close(theirs.values, ours.values)


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name=name.split(".")[0])

    monkeypatch.setattr(kernel_peers.importlib, "import_module", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernel_peers.library_quantisers() == ([], ["bitsandbytes: not installed", "torchao: not installed"])
    assert kernel_peers.torchft_fp8() == (None, "torchft: not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "GPUs only" in kernel_peers.torchft_fp8()[1]
    monkeypatch.setattr(kernel_peers.shutil, "which", lambda name: None)
    assert kernel_peers.compiler() == (False, "torch.compile: there is no g++")


def test_feedback_error_is_the_last_residual_over_the_sum() -> None:
    deltas = [torch.full((8,), 0.3) for _ in range(7)]
    assert feedback_error(torch.round, deltas) == pytest.approx(0.1 / 2.1, rel=1e-5)  # sends 2 of 2.1
    assert feedback_error(lambda values: values, deltas) == pytest.approx(0, abs=1e-6)


def test_the_error_of_a_format_is_its_distance_from_what_it_decodes(reference: Kernels) -> None:
    data = {"normal": gaussian(ELEMENTS, 6), "heavy": heavy_tailed(ELEMENTS, 6)}
    half = kernel_peers.Quantiser("half", 4.5, lambda values: values, lambda values: values / 2)
    records = quality_records(reference, [half], data)
    errors = {(r.name, r.parameters["data"], r.parameters["format"]): r.value for r in records}
    assert errors[ONE_ENCODE, "normal", "half"] == 0.5
    for kind in data:
        for code in CODES:
            one, summed = (errors[name, kind, f"{code}, fp16 scales"] for name in (ONE_ENCODE, FED_BACK))
            assert 0 < summed < one < 1, (kind, code)  # feedback: what was lost in a round comes in the next
        assert errors[ONE_ENCODE, kind, "int8, fp16 scales"] < errors[ONE_ENCODE, kind, "int4, fp16 scales"]
    assert errors[ONE_ENCODE, "normal", "int4, fp16 scales"] == pytest.approx(0.107, abs=0.004)
    bits = {r.parameters["format"]: r.parameters["bits a parameter"] for r in records}
    assert bits["int4, fp16 scales"] == "4.250"
    assert bits["bins2, fp16 scales"] == "2.250"
    assert bits["int4, e4m4 scales"] == "4.129"


def test_the_data_are_what_they_are_called() -> None:
    normal, student = gaussian(1 << 16, 2), heavy_tailed(1 << 16, 2)
    assert not torch.equal(*normal)
    assert not torch.equal(*student)
    assert normal[0].std().item() == pytest.approx(1, rel=0.02)
    assert (student[0].abs() > 5.841).double().mean().item() == pytest.approx(0.01, rel=0.15)  # its 99.5% quantile
    assert student[0].mean().item() == pytest.approx(0, abs=0.03)


def test_memory_that_a_work_takes_is_seen_though_it_gives_it_back() -> None:
    elements = 12 << 20
    grown = peak_growth(lambda: torch.ones(elements).sum(), CPU)
    assert 3.9 * elements < grown < 6 * elements  # Linux may be some hundred KB behind in its count
    buffer = torch.ones(elements)
    assert peak_growth(lambda: buffer.mul_(2), CPU) < elements


def made_up(ratio: float) -> tuple[list[Record], list[Record], list[Record]]:
    """Records of all kinds: every kernel takes `ratio` times a copy, peers take 10 times a kernel."""
    timed = [Record(case.operation, case.parameters, ratio, "s", ratio, COPY) for case in grid([1 << 20, 1 << 22])]
    peers = [
        Record(PEERS, {"operation": name, "elements": "4M", "program": program}, 10.0, "s", 10.0, OURS)
        for name in kernel_peers.TORCH_FUNCTIONS
        for program in (kernel_peers.EAGER, kernel_peers.COMPILED, "a library")
    ]
    memory = [
        Record(
            MEMORY,
            {"operation": name, "elements": "4M", "format": "int4", "scales": "fp16"},
            9.0,
            "B",
            0.002,
            "buffers",
        )
        for name in OPERATIONS
    ]
    return timed, peers, memory


def test_targets_are_next_to_what_was_measured_at_the_largest_size() -> None:
    timed, peers, memory = made_up(1.2)
    small = [replace(r, ratio=99.0) for r in timed if r.parameters["elements"] == "1M"]
    timed = small + [r for r in timed if r.parameters["elements"] == "4M"]
    records = target_records(timed, peers, memory)
    assert len(records) == len(OVER_COPY) + 2 * 3 + len(OPERATIONS)
    met = {(r.parameters["what"], r.parameters["over"]): (r.ratio or math.nan) <= 1 for r in records}
    assert {r.value for r in records if r.parameters["over"] == "time of a copy"} == {1.2}
    assert not met["encode int4, nearest", "time of a copy"]
    assert met["encode e2m1, nearest", "time of a copy"]
    assert met["encode int4", "time of torch.compile"]
    assert not met["encode int4", "time of eager torch"]  # 10 times, and 20 are wanted
    assert all(r.value == 0.002 and r.ratio == 0.002 / EXTRA_MEMORY for r in records[-len(OPERATIONS) :])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    roofline.draw(made_up(1.2)[0], tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_works_take_turns_and_the_first_calls_do_not_count() -> None:
    calls: list[str] = []
    times = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, CPU, 0.0)  # type: ignore[misc]
    assert "".join(calls) == "abc" + "abc" + "abc" + "cba" + "abc"
    assert set(times) == set("abc")


def test_a_copy_moves_half_of_the_bytes_there_and_half_back() -> None:
    copy = Copy(1 << 20, CPU)
    assert copy.factor == 1
    assert copy._source.nbytes == copy._target.nbytes == 1 << 19
    assert Copy(1 << 20, CPU)._source.data_ptr() != copy._target.data_ptr()
    assert COPY_BYTES_AT_MOST % 8 == 0


@pytest.mark.parametrize(
    ("text", "elements"), [("1M", 1 << 20), ("3K", 3 << 10), ("1G", 1 << 30), ("1025K", 1025 << 10)]
)
def test_sizes_are_read_and_written(text: str, elements: int) -> None:
    assert parse_elements(text) == elements
    assert in_words(elements) == text


@pytest.mark.parametrize("text", ["", "M", "1", "1.5M", "-1M", "0M", "1T"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 16M"):
        parse_elements(text)


def test_sizes_that_do_not_fit_are_refused() -> None:
    check_fits([1 << 20], CPU)
    with pytest.raises(ValueError, match="choose smaller"):
        check_fits([1 << 20, 1 << 40], CPU)
