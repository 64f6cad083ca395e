"""Block codecs: int8 and int4 codes with one scale a block."""

from dilocox.errors import ConfigError
from dilocox.outer.codecs.format_codec import FormatCodec
from dilocox_kernels.formats import BLOCK_SIZES, SCALE_DTYPES, BlockFormat

_BITS = {"int4": 4, "int8": 8}


class Block(FormatCodec):
    """Symmetric absmax quantisation in blocks; int4 with blocks of 64 and fp16 scales is 4.25 bits a parameter."""

    def __init__(
        self, format: str, block_size: int, scale_dtype: str, error_feedback: bool, residual_decay: float
    ) -> None:
        if format not in _BITS:
            raise ConfigError("codec.format", format, "not known", f"Choose {' or '.join(_BITS)}")
        if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
            raise ConfigError(
                "codec.block_size",
                block_size,
                "expected a power of two from 32 to 256",
                f"Choose one of {', '.join(map(str, BLOCK_SIZES))}",
            )
        if scale_dtype not in SCALE_DTYPES:
            raise ConfigError("codec.scale_dtype", scale_dtype, "not known", f"Choose one of {', '.join(SCALE_DTYPES)}")
        super().__init__(BlockFormat(_BITS[format], block_size, scale_dtype), error_feedback, residual_decay)
