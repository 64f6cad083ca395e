"""The reference back end: encode and decode in plain torch, on any device, with scratch memory of a few chunks.

Every step is an elementwise fp32 operation of its own (one rounding each, nothing fused), so bytes and residuals are
the same on every device, at any number of threads, and however a range is cut at multiples of the alignment.
"""

from collections.abc import Iterator

from torch import Tensor

from dilocox_kernels.formats import Format
from dilocox_kernels.norms import TREE_ELEMENTS, Norms, RunningNorms

CPU_CHUNK_ELEMENTS = TREE_ELEMENTS
"""A multiple of every block size; its scratch fits a core's cache."""
DEVICE_CHUNK_ELEMENTS = 16 * TREE_ELEMENTS
"""Few launches; scratch of some 40 MiB."""


def encode(
    fmt: Format, delta: Tensor, residual: Tensor | None, decay: float, out: Tensor, residual_out: Tensor | None
) -> Norms:
    """Encode Δ + decay · residual into `out`; keep what was not sent in `residual_out`.

    `delta`, `residual`, `residual_out`: fp32 [n], contiguous; `out`: uint8 [fmt.encoded_bytes(n)], its start aligned to
    4 bytes. residual_out = (Δ + decay · residual) − decoded. A NaN or infinity in Δ + decay · residual is never
    encoded: norms.finite is False, `out` and `residual_out` are zeros. Raises ValueError for a body of another size.
    """
    numel = delta.numel()
    _check_size(fmt, out, numel)
    norms = RunningNorms()
    for start, stop in _chunks(delta):
        here = slice(start, stop)
        values = delta[here] if residual is None else (residual[here] * decay).add_(delta[here])
        if not norms.include(delta[here], values):
            out.zero_()
            if residual_out is not None:
                residual_out.zero_()
            break
        decoded = fmt.write(values, start, out, numel)
        if residual_out is not None:
            residual_out[here] = values - decoded
    return norms.result()


def decode(fmt: Format, body: Tensor, out: Tensor) -> None:
    """Decode uint8 `body` [fmt.encoded_bytes(n)] into fp32 `out` [n]; ValueError for another size."""
    numel = out.numel()
    _check_size(fmt, body, numel)
    for start, stop in _chunks(out):
        out[start:stop] = fmt.read(body, start, stop, numel)


def decode_accumulate(fmt: Format, body: Tensor, weight: float, out: Tensor) -> None:
    """out[n] += fp32(weight) · decoded(body) in fp32: one rounding for the product, one for the sum.

    Raises ValueError for a body of another size.
    """
    numel = out.numel()
    _check_size(fmt, body, numel)
    for start, stop in _chunks(out):
        out[start:stop] += fmt.read(body, start, stop, numel).mul_(weight)


def _chunks(values: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges that are worked on in turn."""
    chunk = CPU_CHUNK_ELEMENTS if values.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    for start in range(0, values.numel(), chunk):
        yield start, min(start + chunk, values.numel())


def _check_size(fmt: Format, body: Tensor, numel: int) -> None:
    if body.numel() != fmt.encoded_bytes(numel):
        raise ValueError(
            f"a body of {body.numel()} bytes; {numel} elements in {fmt.name} take {fmt.encoded_bytes(numel)}"
        )
