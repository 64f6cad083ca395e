"""Formats, ranges and short calls that the tests of the operations share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels.formats import BLOCK_SIZES, CODES, SCALE_DTYPES, BlockFormat, CastFormat, Format
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.norms import Norms
from dilocox_kernels.rules import Stochastic
from dilocox_kernels.spans import Spans

BACKENDS = ("reference", "cpu")
SOME_FORMATS: list[Format] = [
    CastFormat("fp32"),
    CastFormat("bf16"),
    BlockFormat("int4", 64, "fp16"),
    BlockFormat("int4", 32, "e4m4"),
    BlockFormat("int8", 32, "bf16"),
    BlockFormat("e2m1", 128, "fp32"),
    BlockFormat("e3m0", 64, "fp16"),
    BlockFormat("bins2", 256, "fp16"),
]
BLOCK_FORMATS = st.builds(
    BlockFormat, st.sampled_from(list(CODES)), st.sampled_from(BLOCK_SIZES), st.sampled_from(list(SCALE_DTYPES))
)


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def encode(
    kernels: Kernels,
    fmt: Format,
    values: Sequence[Tensor],
    spans: Spans | None = None,
    *,
    anchor: Tensor | None = None,
    residual: Tensor | None = None,
    decay: float = 1.0,
    rounding: Stochastic | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor, Norms]:
    """(body, new residual, norms); gaps of the residual hold 7."""
    spans = spans or Spans.whole(values[0].numel())
    body = torch.full((fmt.encoded_bytes(spans.numel),), 0xAA, dtype=torch.uint8)
    kept = torch.full((spans.numel,), 7.0, dtype=torch.float32 if residual is None else residual.dtype)
    norms = kernels.encode(
        fmt,
        values,
        spans,
        anchor=anchor,
        residual=residual,
        decay=decay,
        rounding=rounding,
        start=start,
        out=body,
        residual_out=kept,
    )
    return body, kept, norms


def decode(kernels: Kernels, fmt: Format, body: Tensor, spans: Spans) -> Tensor:
    out = torch.full((spans.numel,), torch.nan)
    kernels.decode(fmt, body, spans, out)
    return out


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
