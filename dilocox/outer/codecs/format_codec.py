"""A codec that is one format with error feedback: what casts and block codecs have in common."""

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.codecs.protocol import Norms
from dilocox_kernels import reference
from dilocox_kernels.formats import Format


class FormatCodec:
    """Implements `codecs.protocol.Codec` over a format of dilocox_kernels.

    `residual_decay` weights what earlier rounds failed to send; 1 keeps all of it.
    """

    def __init__(self, fmt: Format, error_feedback: bool, residual_decay: float) -> None:
        if not isinstance(residual_decay, int | float) or not 0 <= residual_decay <= 1:
            raise ConfigError(
                "codec.residual_decay",
                residual_decay,
                "expected a number from 0 to 1",
                "Use 1.0 to keep all that was not sent",
            )
        self.format = fmt
        self.name = fmt.name
        self.alignment = fmt.alignment
        self.error_feedback = error_feedback
        self.residual_decay = float(residual_decay)

    def encoded_bytes(self, numel: int) -> int:
        return self.format.encoded_bytes(numel)

    def encode(self, delta: Tensor, residual: Tensor | None, out: Tensor, residual_out: Tensor | None) -> Norms:
        return reference.encode(self.format, delta, residual, self.residual_decay, out, residual_out)

    def decode_accumulate(self, body: Tensor, weight: float, out: Tensor) -> None:
        reference.decode_accumulate(self.format, body, weight, out)
