"""What a codec must do: turn a pseudo-gradient into wire bytes and back."""

from typing import Protocol

from torch import Tensor

from dilocox_kernels.norms import Norms

__all__ = ["Codec", "Norms"]


class Codec(Protocol):
    """Encodes flat fp32 ranges, each independently of its neighbours.

    Error feedback: with a residual r (what earlier rounds failed to send) and Δ, the codec sends q ≈ Δ + decay·r and
    keeps Δ + decay·r − q. The caller owns both residual buffers and swaps them only when the round commits, so that a
    repeated sync sends the same bytes.
    """

    name: str
    alignment: int
    """Ranges start at multiples of this many elements, so that no block crosses a tensor."""
    error_feedback: bool

    def encoded_bytes(self, numel: int) -> int:
        """Size of the encoded body of `numel` elements."""

    def encode(self, delta: Tensor, residual: Tensor | None, out: Tensor, residual_out: Tensor | None) -> Norms:
        """Encode fp32 `delta` [n] (plus residual [n]) into uint8 `out` [encoded_bytes(n)].

        `residual_out` [n] gets what was not sent; both residuals are None without error feedback. `delta` is left as
        it is; `residual_out` may not alias `residual`.
        """

    def decode_accumulate(self, body: Tensor, weight: float, out: Tensor) -> None:
        """out[n] += weight · decoded(body), in fp32, one rounding for the product and one for the sum."""
