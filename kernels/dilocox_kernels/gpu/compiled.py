"""Kernels compiled ahead of time for GPUs that need not be there, and what the machine code says of them.

Not for the interpreter: TRITON_INTERPRET must not have been set when `dilocox_kernels.gpu` was imported.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from dilocox_kernels.gpu.launches import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100, B200, MI300."""
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class MachineCode:
    """What one kernel takes on one target."""

    registers: int
    """Vector registers a thread."""
    shared_bytes: int
    """Shared memory (LDS) a program."""
    local_bytes: int
    """Stack and scratch memory a thread: where spills and indexed arrays go."""
    spills: int
    """Registers spilled (AMD), loads and stores of local memory (NVIDIA)."""
    loads: dict[int, int]
    """Instructions that read global memory, by bytes a thread."""
    stores: dict[int, int]
    """Instructions that write global memory, by bytes a thread."""
    inexact: tuple[str, ...]
    """Arithmetic that does not round once an operation: fused, approximate, or with subnormals flushed to zero."""


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Compile what `launch` would run, as the same call would on that target."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):  # type: ignore[attr-defined]
        argument = launch.arguments[parameter.name]
        if parameter.is_constexpr or argument is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", argument
        elif isinstance(argument, Tensor):
            signature[parameter.name] = _TYPES[argument.dtype]
            if argument.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": launch.num_warps, "enable_fp_fusion": False})


def machine_code(compiled: CompiledKernel) -> MachineCode:
    """Read the numbers out of the cubin (by the tools in Triton's wheel) or the amdgcn text."""
    return _of_amd(compiled) if "amdgcn" in compiled.asm else _of_nvidia(compiled)


def _of_nvidia(compiled: CompiledKernel) -> MachineCode:
    cubin = compiled.asm["cubin"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _tool("cuobjdump", "-res-usage", cubin)))
    text = _tool("nvdisasm", "-c", cubin)
    return MachineCode(
        registers=int(usage["REG"]),
        shared_bytes=compiled.metadata.shared,
        local_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        loads=_widths(re.findall(r"\bLDG\.E(?:\.\w+)*", text)),
        stores=_widths(re.findall(r"\bSTG\.E(?:\.\w+)*", text)),
        # In PTX: the machine code of a correctly rounded division has fused steps of its own.
        inexact=_found(r"\bfma\.[.\w]+|\b[.\w]+\.(?:ftz|approx|full)\b", compiled.asm["ptx"]),
    )


def _of_amd(compiled: CompiledKernel) -> MachineCode:
    text = compiled.asm["amdgcn"]
    fields = dict(re.findall(r"\.(\w+):\s+(\d+)", text))
    return MachineCode(
        registers=int(fields["vgpr_count"]),
        shared_bytes=compiled.metadata.shared,
        local_bytes=int(fields["private_segment_fixed_size"]),
        spills=int(fields["vgpr_spill_count"]) + int(fields["sgpr_spill_count"]),
        loads=_widths(re.findall(r"\b(?:global|buffer)_load_\w+", text)),
        stores=_widths(re.findall(r"\b(?:global|buffer)_store_\w+", text)),
        inexact=_found(r"\b(?:contract|afn|arcp|reassoc|fast)\b|!fpmath|llvm\.fma|llvm\.fmuladd", compiled.asm["llir"])
        + _found(r"float_denorm_mode_32 [0-2]", text),
    )


def _found(pattern: str, text: str) -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(pattern, text))))


def _widths(instructions: list[str]) -> dict[int, int]:
    """Counts by width, the widest first."""
    counts: dict[int, int] = {}
    for instruction in instructions:
        width = next((size for name, size in _WIDTHS.items() if re.search(name, instruction)), 4)
        counts[width] = counts.get(width, 0) + 1
    return dict(sorted(counts.items(), reverse=True))


_WIDTHS = {r"\.128|dwordx4": 16, r"dwordx3": 12, r"\.64|dwordx2": 8, r"[US]16|short": 2, r"[US]8|byte": 1}
"""4 where none of them stands."""


def _tool(name: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / name, option, file.name], capture_output=True, text=True, check=True).stdout
