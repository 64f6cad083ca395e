"""What formats lose: the relative error of one encode, and what error feedback leaves of it after many rounds."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.contract import Record
from benchmarks.kernel_cases import BLOCK_SIZE, CODES, PLAIN, SCALES
from benchmarks.kernel_peers import Quantiser
from dilocox_kernels.formats import BlockFormat
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.spans import Spans

REFERENCE = "int4, fp16 scales"
ONE_ENCODE = "relative error of one encode"
FED_BACK = "relative error of the sum of all rounds, with error feedback"

RoundTrip = Callable[[Tensor], Tensor]
"""fp32 [n] to what a receiver decodes of it."""


def quality_records(kernels: Kernels, libraries: Sequence[Quantiser], data: dict[str, list[Tensor]]) -> list[Record]:
    """By kind of data, one Δ a round, and by format: the error of the middle round alone, and that of all rounds."""
    coders = {**_formats(kernels), **{each.name: (each.bits, _library(each)) for each in libraries}}
    records = []
    for kind, deltas in data.items():
        middle = deltas[len(deltas) // 2]  # the first rounds of a training run are unlike all others
        one = {name: relative_error(trip(middle), middle) for name, (_, trip) in coders.items()}
        fed_back = {name: feedback_error(trip, deltas) for name, (_, trip) in coders.items()}
        for name, (bits, _) in coders.items():
            parameters: dict[str, object] = {"data": kind, "format": name, "bits a parameter": f"{bits:.3f}"}
            for title, extra, errors in (
                (ONE_ENCODE, {}, one),
                (FED_BACK, {"rounds": len(deltas)}, fed_back),
            ):
                ratio = errors[name] / errors[REFERENCE]
                records.append(Record(title, {**parameters, **extra}, errors[name], "relative", ratio, REFERENCE))
    return records


def relative_error(sent: Tensor, wanted: Tensor) -> float:
    """‖sent − wanted‖ / ‖wanted‖ in float64."""
    return ((sent.double() - wanted.double()).norm() / wanted.double().norm()).item()


def feedback_error(round_trip: RoundTrip, deltas: Sequence[Tensor]) -> float:
    """‖Σ sent − Σ Δ‖ / ‖Σ Δ‖ when each round sends Δ + residual, the residual in fp32; sums in float64."""
    residual = torch.zeros_like(deltas[0])
    sent, wanted = torch.zeros_like(residual, dtype=torch.float64), torch.zeros_like(residual, dtype=torch.float64)
    for delta in deltas:
        values = delta + residual
        decoded = round_trip(values)
        residual = values - decoded
        sent += decoded
        wanted += delta
    return relative_error(sent, wanted)


def gaussian(elements: int, rounds: int) -> list[Tensor]:
    """Independent normal Δ, a new one each round."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(elements, generator=generator) for _ in range(rounds)]


def heavy_tailed(elements: int, rounds: int) -> list[Tensor]:
    """Independent Δ of Student's t distribution with 3 degrees of freedom: normal / √(χ²₃ / 3)."""
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator)
    return [draw(elements) / draw(3, elements).square_().mean(dim=0).sqrt_() for _ in range(rounds)]


def _formats(kernels: Kernels) -> dict[str, tuple[float, RoundTrip]]:
    formats = {f"{code}, {scale} scales": BlockFormat(code, BLOCK_SIZE, scale) for code in CODES for scale in SCALES}
    return {name: (fmt.bits_per_parameter, partial(_round_trip, kernels, fmt)) for name, fmt in formats.items()}


def _round_trip(kernels: Kernels, fmt: BlockFormat, values: Tensor) -> Tensor:
    spans = Spans.whole(values.numel())
    body = torch.zeros(fmt.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    decoded = torch.zeros_like(values)
    kernels.encode(fmt, [values], spans, **PLAIN, out=body)
    kernels.decode(fmt, body, spans, decoded)
    return decoded


def _library(quantiser: Quantiser) -> RoundTrip:
    return lambda values: quantiser.dequantise(quantiser.quantise(values))
