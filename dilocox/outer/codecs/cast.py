"""Casts: every element on its own, in fp32 or bf16."""

from dilocox.errors import ConfigError
from dilocox.outer.codecs.format_codec import FormatCodec
from dilocox_kernels.formats import CAST_DTYPES, CastFormat


class Cast(FormatCodec):
    """Elements rounded to nearest even in `dtype`: fp32 (exact, 32 bits a parameter) or bf16 (16 bits)."""

    def __init__(self, dtype: str, error_feedback: bool, residual_decay: float, residual_dtype: str) -> None:
        if dtype not in CAST_DTYPES:
            raise ConfigError("codec.dtype", dtype, "not known", f"Choose {' or '.join(CAST_DTYPES)}")
        super().__init__(CastFormat(dtype), error_feedback, residual_decay, residual_dtype, seed=None)
