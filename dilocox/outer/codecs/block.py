"""Block codecs: codes of a few bits with one scale a block."""

from dilocox.errors import ConfigError
from dilocox.outer.codecs.format_codec import FormatCodec
from dilocox_kernels.formats import BLOCK_SIZES, CODES, SCALE_DTYPES, BlockFormat

_ROUNDINGS = ("nearest", "stochastic")


class Block(FormatCodec):
    """Quantisation in blocks; int4 with blocks of 64 and fp16 scales is 4.25 bits a parameter.

    `format` is int8, int4, e2m1, e3m0 (4 bits each) or bins2 (2 bits); see kernels/README.md. `seed` counts for
    stochastic rounding only.
    """

    def __init__(
        self,
        format: str,
        block_size: int,
        scale_dtype: str,
        rounding: str,
        error_feedback: bool,
        residual_decay: float,
        residual_dtype: str,
        seed: int,
    ) -> None:
        _check("format", format, tuple(CODES))
        _check("scale_dtype", scale_dtype, tuple(SCALE_DTYPES))
        _check("rounding", rounding, _ROUNDINGS)
        if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
            raise ConfigError(
                "codec.block_size",
                block_size,
                "expected a power of two from 32 to 256",
                f"Choose one of {', '.join(map(str, BLOCK_SIZES))}",
            )
        super().__init__(
            BlockFormat(format, block_size, scale_dtype),
            error_feedback,
            residual_decay,
            residual_dtype,
            seed=seed if rounding == "stochastic" else None,
        )


def _check(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"codec.{field}", value, "not known", f"Choose one of {', '.join(choices)}")
