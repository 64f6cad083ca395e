"""A codec that is one format with error feedback: what casts and block codecs have in common."""

import hashlib
import struct
from collections.abc import Sequence

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.codecs.protocol import Codes, Destination, Norms, Origin
from dilocox_kernels.formats import CAST_DTYPES, Format
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.rules import OuterRule, Stochastic
from dilocox_kernels.spans import Spans


class FormatCodec:
    """Implements `codecs.protocol.Codec` over a format of dilocox_kernels.

    `residual_decay` weights what earlier rounds failed to send; 1 keeps all of it. With a `seed` codes are rounded up
    or down at random, else to the nearest.
    """

    def __init__(
        self, fmt: Format, error_feedback: bool, residual_decay: float, residual_dtype: str, seed: int | None
    ) -> None:
        if not isinstance(residual_decay, int | float) or not 0 <= residual_decay <= 1:
            raise ConfigError(
                "codec.residual_decay",
                residual_decay,
                "expected a number from 0 to 1",
                "Use 1.0 to keep all that was not sent",
            )
        if residual_dtype not in CAST_DTYPES:
            raise ConfigError("codec.residual_dtype", residual_dtype, "not known", f"Choose {' or '.join(CAST_DTYPES)}")
        self.format = fmt
        self.name = fmt.name
        self.alignment = fmt.alignment
        self.error_feedback = error_feedback
        self.residual_decay = float(residual_decay)
        self.residual_dtype = CAST_DTYPES[residual_dtype]
        self.seed = seed

    def encoded_bytes(self, numel: int) -> int:
        return self.format.encoded_bytes(numel)

    def encode(
        self,
        kernels: Kernels,
        values: Sequence[Tensor],
        spans: Spans,
        anchor: Tensor | None,
        origin: Origin,
        destination: Destination,
    ) -> Norms:
        return kernels.encode(
            self.format,
            values,
            spans,
            anchor=anchor,
            residual=destination.committed,
            decay=self.residual_decay,
            rounding=self._rounding(origin),
            start=origin.start,
            out=destination.body,
            residual_out=destination.pending,
        )

    def requantise(self, kernels: Kernels, codes: Codes, origin: Origin, destination: Destination) -> Norms:
        return kernels.requantise(
            self.format,
            codes.bodies,
            codes.weights,
            codes.spans,
            residual=destination.committed,
            decay=self.residual_decay,
            rounding=self._rounding(origin),
            start=origin.start,
            out=destination.body,
            residual_out=destination.pending,
        )

    def decode(self, kernels: Kernels, codes: Codes, out: Tensor) -> None:
        kernels.decode_accumulate(self.format, codes.bodies, codes.weights, codes.spans, out)

    def outer_step(
        self,
        kernels: Kernels,
        codes: Codes,
        *,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
    ) -> int:
        return kernels.outer_step(
            self.format,
            codes.bodies,
            codes.weights,
            codes.spans,
            anchor=anchor,
            momentum=momentum,
            values=values,
            rule=rule,
            local_weight=local_weight,
            start=codes.start,
        )

    def _rounding(self, origin: Origin) -> Stochastic | None:
        """Random numbers of this island, fragment and hop: with shared ones the islands' errors would add up."""
        if self.seed is None:
            return None
        place = struct.pack("<4q", self.seed, origin.island, origin.fragment, origin.hop)
        key = hashlib.blake2b(place, digest_size=8).digest()
        return Stochastic(int.from_bytes(key, "little"), origin.number % (1 << 32))
