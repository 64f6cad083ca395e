"""The compiled library: finding and loading it, and its C structures, as in csrc/library.h."""

from collections.abc import Callable
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

from dilocox_kernels.backend import BackendError

ABI_VERSION = 1
"""kAbiVersion of csrc/library.h."""
PATH = Path(__file__).with_name("libdilocox_kernels.so")
_BUILD = "build it with a C++ compiler (g++) there: `make setup` in a checkout, or `pip install` of the package"


class Format(Structure):
    _fields_ = (("code", c_int32), ("scale_kind", c_int32), ("block_size", c_int32), ("max_scale", c_float))


class Spans(Structure):
    _fields_ = (
        ("numel", c_int64),
        ("count", c_int64),
        ("starts", POINTER(c_int64)),
        ("stops", POINTER(c_int64)),
        ("values", POINTER(c_void_p)),
        ("values_dtype", c_int32),
    )


class Bodies(Structure):
    _fields_ = (("count", c_int64), ("bodies", POINTER(c_void_p)), ("weights", POINTER(c_float)))


class TileNorms(Structure):
    _fields_ = (("sum_of_squares", c_double), ("delta_bits", c_uint32), ("value_bits", c_uint32))


class EncodeJob(Structure):
    _fields_ = (
        ("format", Format),
        ("spans", Spans),
        ("bodies", Bodies),
        ("anchor", c_void_p),
        ("residual", c_void_p),
        ("residual_out", c_void_p),
        ("residual_dtype", c_int32),
        ("decay", c_float),
        ("stochastic", c_int32),
        ("key", c_uint64),
        ("round", c_uint32),
        ("start", c_int64),
        ("out", c_void_p),
        ("tile_norms", POINTER(TileNorms)),
        ("norms", TileNorms),
    )


class DecodeJob(Structure):
    _fields_ = (("format", Format), ("spans", Spans), ("bodies", Bodies), ("out", c_void_p))


class OuterStepJob(Structure):
    _fields_ = (
        ("format", Format),
        ("spans", Spans),
        ("bodies", Bodies),
        ("anchor", c_void_p),
        ("momentum", c_void_p),
        ("rule", c_int32),
        ("lr", c_float),
        ("mu", c_float),
        ("local_weight", c_float),
        ("anchor_weight", c_float),
        ("start", c_int64),
        ("tile_sums", POINTER(c_uint64)),
        ("checksum", c_uint64),
    )


_FUNCTIONS = {
    "abi_version": (c_int32, ()),
    "level_name": (c_char_p, (c_int32,)),
    "level_runs_here": (c_int32, (c_int32,)),
    "encode": (None, (c_int32, POINTER(EncodeJob), c_int32)),
    "decode_accumulate": (None, (c_int32, POINTER(DecodeJob), c_int32)),
    "outer_step": (None, (c_int32, POINTER(OuterStepJob), c_int32)),
    "checksum": (c_uint64, (c_int32, c_void_p, c_int64, c_int64, c_int32)),
}


class Library:
    """The functions of a library file. Calls let other Python threads run."""

    def __init__(self, path: Path) -> None:
        """Raises BackendError if there is no such file, if it does not load, or is of another version."""
        if not path.is_file():
            raise BackendError(f"kernels=cpu: {path} is missing; {_BUILD}")
        try:
            library = CDLL(str(path))
            functions = {name: getattr(library, f"dilocox_{name}") for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise BackendError(f"kernels=cpu: {path} does not load ({error}); {_BUILD}") from error
        for name, (result, arguments) in _FUNCTIONS.items():
            functions[name].restype, functions[name].argtypes = result, arguments
        version = functions["abi_version"]()
        if version != ABI_VERSION:
            raise BackendError(
                f"kernels=cpu: {path} has interface {version}, this package needs {ABI_VERSION}; {_BUILD}"
            )
        self.encode = functions["encode"]
        self.decode_accumulate = functions["decode_accumulate"]
        self.outer_step = functions["outer_step"]
        self._checksum = functions["checksum"]
        self.levels = _levels(functions["level_name"], functions["level_runs_here"])

    @property
    def best_level(self) -> int:
        """Number of the widest level of instructions that this processor has."""
        return next(iter(self.levels.values()))

    def checksum(self, address: int, size: int, start: int, threads: int) -> int:
        """`checksum64` of `size` bytes in host memory."""
        return int(self._checksum(self.best_level, address, size, start, threads))


def _levels(name_of: Callable[[int], bytes | None], runs_here: Callable[[int], int]) -> dict[str, int]:
    """Levels of instructions that this processor has, and their numbers, the best first."""
    levels: dict[str, int] = {}
    number = 0
    while (name := name_of(number)) is not None:
        if runs_here(number):
            levels[name.decode()] = number
        number += 1
    return levels


@cache
def load() -> Library:
    """The package's own library; raises BackendError when it cannot be had."""
    return Library(PATH)
