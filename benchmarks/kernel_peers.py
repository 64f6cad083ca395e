"""What people use instead of the kernels: eager torch, the same under torch.compile, and quantisers of libraries.

The torch functions write the layout of the kernels' int4 bodies (codes and fp16 scales in two tensors), scales rounded
to nearest; they leave out norms, checksums and the search for NaN that the kernels have in the same pass. The
libraries only quantise an fp32 tensor, without difference and error feedback.
"""

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import BLOCK_SIZE, Buffers, Case
from benchmarks.timing import Work

EAGER, COMPILED = "eager torch", "torch.compile"
TOP = 7
LEARNING_RATE, MOMENTUM = 0.7, 0.9


def encode(anchor: Tensor, values: Tensor, residual: Tensor, residual_out: Tensor) -> tuple[Tensor, Tensor]:
    """int4 codes uint8 [blocks, 32] and fp16 scales [blocks, 1] of anchor − values + residual; keeps the rest."""
    wanted = (anchor - values).add_(residual).view(-1, BLOCK_SIZE)
    scales = wanted.abs().amax(dim=1, keepdim=True).div_(TOP).to(torch.float16)
    divisor = scales.float()
    codes = (wanted / torch.where(divisor == 0, 1.0, divisor)).round_().clamp_(-TOP, TOP)
    residual_out.copy_((wanted - codes * divisor).view(-1))
    codes = codes.to(torch.int8)
    return (codes[:, 0::2] & 0x0F | codes[:, 1::2] << 4).view(torch.uint8), scales


def decode_accumulate(codes: Sequence[Tensor], scales: Sequence[Tensor], weight: float, merged: Tensor) -> None:
    """merged = Σ weight · codes · scales, fp32."""
    blocks = merged.view(-1, BLOCK_SIZE).zero_()
    for code, scale in zip(codes, scales, strict=True):
        blocks.addcmul_(_unpacked(code), scale.float() * weight)


def outer_step(
    codes: Sequence[Tensor], scales: Sequence[Tensor], weight: float, anchor: Tensor, momentum: Tensor, values: Tensor
) -> None:
    """Merge, Nesterov, and the local weights overwritten with the new anchor."""
    merged = torch.empty_like(anchor)
    decode_accumulate(codes, scales, weight, merged)
    momentum.mul_(MOMENTUM).add_(merged)
    anchor.sub_(merged.add_(momentum, alpha=MOMENTUM), alpha=LEARNING_RATE)
    values.copy_(anchor)


def _unpacked(codes: Tensor) -> Tensor:
    """fp32 [blocks, 64] of two's complement nibbles, the low one first."""
    pairs = codes.view(torch.int8)
    return torch.stack((pairs << 4 >> 4, pairs >> 4), dim=-1).view(len(codes), -1).float()


TORCH_FUNCTIONS: dict[str, Callable[..., object]] = {
    "encode": encode,
    "decode_accumulate": decode_accumulate,
    "outer_step": outer_step,
}


def torch_works(case: Case, buffers: Buffers, bodies: Sequence[Tensor]) -> dict[str, Work]:
    """What of torch does the same as the kernels in this int4 case, by name, on the same buffers."""
    parts = [case.format.split(body, case.elements) for body in bodies]
    codes, scales = [part.codes for part in parts], [part.scales.view(-1, 1) for part in parts]
    arguments = {
        "encode": (buffers.anchor, buffers.values, buffers.residual, buffers.residual_out),
        "decode_accumulate": (codes, scales, 1 / len(bodies), buffers.merged),
        "outer_step": (codes, scales, 1 / len(bodies), buffers.anchor, buffers.momentum, buffers.values),
    }[case.operation]
    eager = TORCH_FUNCTIONS[case.operation]
    works: dict[str, Work] = {EAGER: partial(eager, *arguments)}
    if compiler()[0]:
        works[COMPILED] = partial(torch.compile(eager, dynamic=False), *arguments)
    return works


def library_works(values: Tensor) -> dict[str, Work]:
    """The quantisers of libraries on fp32 [n], by name."""
    works: dict[str, Work] = {each.name: partial(each.quantise, values) for each in library_quantisers()[0]}
    fp8, _ = torchft_fp8()
    if fp8 is not None:
        works["torchft fp8"] = partial(fp8, values)
    return works


@dataclass(frozen=True)
class Quantiser:
    """A library's way through 4 bits and back."""

    name: str
    bits: float
    """A parameter, scales included, as the library stores them (codes in whole nibbles)."""
    quantise: Callable[[Tensor], Any]
    """fp32 [n] to whatever `dequantise` takes."""
    dequantise: Callable[[Any], Tensor]


def library_quantisers() -> tuple[list[Quantiser], list[str]]:
    """Those that can be had here, and a sentence on each library, whether it can or not."""
    found: list[Quantiser] = []
    notes = []
    for package, module, make in (
        ("bitsandbytes", "bitsandbytes.functional", _bitsandbytes),
        ("torchao", "torchao.quantization.quant_primitives", _torchao),
    ):
        imported, note = _import(package, module)
        notes.append(note)
        if imported is not None:
            found += make(imported)
    return found, notes


def torchft_fp8() -> tuple[Callable[[Tensor], object] | None, str]:
    """torchft's quantiser of fp32 [n] to fp8, which runs on GPUs only, and a sentence on it."""
    if not torch.cuda.is_available():
        return None, "torchft: its fp8 quantiser runs on GPUs only, and there is none here"
    imported, note = _import("torchft", "torchft.quantization")
    if imported is None:
        return None, note
    return lambda values: imported.fused_quantize_into_fp8([values.view(-1, BLOCK_SIZE)], 1), note


def _import(package: str, module: str) -> tuple[Any, str]:
    """The module or None, and a sentence: its version, or why it is not there."""
    try:
        return importlib.import_module(module), f"{package} {version(package)}"
    except ModuleNotFoundError as error:
        missing = "" if error.name == package else f", or without {error.name}, which it needs"
        return None, f"{package}: not installed{missing}"
    except ImportError as error:
        return None, f"{package} {version(package)}: does not import ({error})"


def compiler() -> tuple[bool, str]:
    """Whether torch.compile can be had here, and a sentence on it; on a CPU it needs a C++ compiler."""
    if not torch.cuda.is_available() and not shutil.which("g++"):
        return False, "torch.compile: there is no g++"
    return True, f"torch.compile of torch {torch.__version__}"


def _bitsandbytes(functional: Any) -> list[Quantiser]:
    def quantiser(kind: str, nested: bool) -> Quantiser:
        scales_bits = 8 * (1 + 4 / 256) if nested else 32  # nested: 8 bits, and an fp32 scale for 256 of them
        return Quantiser(
            f"bitsandbytes {kind.upper()}{', nested scales' if nested else ''}",
            4 + scales_bits / BLOCK_SIZE,
            lambda values: functional.quantize_4bit(
                values, blocksize=BLOCK_SIZE, compress_statistics=nested, quant_type=kind
            ),
            lambda quantised: functional.dequantize_4bit(*quantised).view(-1),
        )

    return [quantiser(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)]


def _torchao(primitives: Any) -> list[Quantiser]:
    """Its affine primitives, symmetric, all 16 codes of a nibble in use; it leaves a code a byte."""
    block, lowest = (1, BLOCK_SIZE), -TOP - 1

    def quantise(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = values.view(1, -1)
        scales, zeros = primitives.choose_qparams_affine(
            rows,
            primitives.MappingType.SYMMETRIC_NO_CLIPPING_ERR,
            block,
            torch.int8,
            lowest,
            TOP,
            scale_dtype=torch.float16,
        )
        return primitives.quantize_affine(rows, block, scales, zeros, torch.int8, lowest, TOP), scales, zeros

    def dequantise(quantised: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        codes, scales, zeros = quantised
        decoded: Tensor = primitives.dequantize_affine(codes, block, scales, zeros, torch.int8, lowest, TOP)
        return decoded.view(-1)

    return [Quantiser("torchao int4, symmetric", 4 + 16 / BLOCK_SIZE, quantise, dequantise)]
