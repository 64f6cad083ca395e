"""What the kernels compile to: `python -m dilocox_kernels.gpu.report > docs/kernels-compiled.md` (no GPU needed)."""

from collections.abc import Iterator

import torch
import triton

from dilocox_kernels.formats import BlockFormat, CastFormat
from dilocox_kernels.gpu.compiled import TARGETS, MachineCode, compile_launch, machine_code
from dilocox_kernels.gpu.launches import Launch
from dilocox_kernels.gpu.samples import Sample
from dilocox_kernels.gpu.tuning import fixed_tiling
from dilocox_kernels.rules import Rule
from dilocox_kernels.spans import Spans

_INT4 = BlockFormat("int4", 64, "fp16")
_WHOLE = Spans.whole(8192)
_CUT = Spans(8192, ((0, 4096), (4352, 8000)))
"""A gap and a tail."""

SAMPLES = {
    "encode": Sample("encode", _INT4),
    "encode, stochastic": Sample("encode", _INT4, stochastic=True),
    "encode, fp32 weights and residual": Sample("encode", _INT4, torch.float32, torch.float32),
    "requantise": Sample("requantise", _INT4),
    "decode_accumulate": Sample("decode_accumulate", _INT4),
    "outer_step": Sample("outer_step", _INT4),
    "outer_step, fp32 weights, local mix": Sample("outer_step", _INT4, torch.float32, local_weight=0.5),
    "outer_step, fp32": Sample("outer_step", CastFormat("fp32"), rule=Rule.MOMENTUM),
    "encode, e2m1": Sample("encode", BlockFormat("e2m1", 32, "e4m4")),
    "encode, e3m0": Sample("encode", BlockFormat("e3m0", 256, "bf16")),
    "encode, bins2": Sample("encode", BlockFormat("bins2", 64, "e4m4")),
    "encode, int8": Sample("encode", BlockFormat("int8", 128, "fp32")),
    "outer_step, e2m1": Sample("outer_step", BlockFormat("e2m1", 32, "e4m4")),
    "outer_step, bins2": Sample("outer_step", BlockFormat("bins2", 64, "e4m4")),
}
"""What is compiled, over whole tiles."""
CUT_SAMPLES = ("encode", "outer_step")
"""And over other tiles."""

_HEAD = """\
# Kernels, compiled

What `python -m dilocox_kernels.gpu.report` found in the machine code of the Triton kernels (triton {version}). No GPU
was there, and no time is claimed. `tests/kernels/test_triton_compiled.py` holds this page to the code. No kernel has a
fused or approximate operation, or one that flushes subnormals: the report stops at one.

- **bytes**: memory traffic a parameter, each stream once, K = 4 bodies (3 for requantise). A model, not a measurement.
- **registers** a thread; **shared** memory a program, in bytes.
- **spilled**: bytes of local memory a thread, or registers spilled, whichever is more. Zero over whole tiles. Cut tiles
  (gaps, tails, values that are not aligned) may spill a little: they are masked, and rare in tensors of some size.
- **loads**, **stores**: instructions for global memory, number × bytes a thread. Big streams move 16 bytes at once.
  Where fp32 is stored, bf16 weights move 8, so that anchor, momentum and weights share one layout and none is
  rearranged through shared memory. Narrow ones are scales, norms, the plan of tiles, and codes: four elements in int4
  are two bytes.

| kernel | format | tile × warps | bytes | target | registers | shared | spilled | loads | stores |
|---|---|---|---|---|---|---|---|---|---|
"""


def report() -> str:
    """The page."""
    return _HEAD.format(version=triton.__version__) + "\n".join(_rows()) + "\n"


def whole_tiles(sample: Sample) -> Launch:
    """The launch over whole tiles."""
    return sample.launches(_WHOLE, torch.device("cpu"))(fixed_tiling(sample.operation, sample.fmt))[0]


def cut_tiles(sample: Sample) -> Launch:
    """The launch over tiles that are not whole."""
    return sample.launches(_CUT, torch.device("cpu"))(fixed_tiling(sample.operation, sample.fmt))[-1]


def rows_of(name: str, sample: Sample, launch: Launch) -> Iterator[str]:
    """A row of the table for each target."""
    tiling = f"{fixed_tiling(sample.operation, sample.fmt).tile} × {launch.num_warps}"
    for target_name, target in TARGETS.items():
        code = machine_code(compile_launch(launch, target))
        if code.inexact:
            raise RuntimeError(f"{name} on {target_name} would not equal the reference: {', '.join(code.inexact)}")
        yield _row([name, sample.fmt.name, tiling, f"{bytes_moved(sample):.2f}", target_name, *_numbers(code)])


def bytes_moved(sample: Sample) -> float:
    """Bytes of memory traffic a parameter: the model that a time on a GPU is to be held against."""
    whole_blocks = 1 << 20
    body = sample.fmt.encoded_bytes(whole_blocks) / whole_blocks
    value, anchor = sample.values.itemsize, 4
    residual = 2 * sample.residual.itemsize if sample.residual else 0
    momentum = 0 if sample.rule is Rule.SGD else 8
    return {
        "encode": value + anchor + residual + body,
        "requantise": (sample.islands - 1) * body + residual + body,
        "decode_accumulate": sample.islands * body + 4,
        "outer_step": sample.islands * body + 2 * anchor + momentum + value * (2 if sample.local_weight else 1),
    }[sample.operation]


def _rows() -> Iterator[str]:
    for name, sample in SAMPLES.items():
        yield from rows_of(name, sample, whole_tiles(sample))
    for name in CUT_SAMPLES:
        yield from rows_of(f"{name}, cut tiles", SAMPLES[name], cut_tiles(SAMPLES[name]))


def _numbers(code: MachineCode) -> list[str]:
    spilled = max(code.spills, code.local_bytes)
    return [str(code.registers), str(code.shared_bytes), str(spilled), _counts(code.loads), _counts(code.stores)]


def _counts(by_width: dict[int, int]) -> str:
    return ", ".join(f"{count} × {width}" for width, count in by_width.items())


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(report(), end="")
