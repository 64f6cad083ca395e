"""The Triton back end, for NVIDIA and AMD GPUs. Nothing outside this folder imports triton.

    TritonBackend(torch.device("cuda", 0))      a `Backend`
    python -m dilocox_kernels.gpu.report        what the kernels compile to, without a GPU
"""

from dilocox_kernels.gpu.backend import TritonBackend

__all__ = ["TritonBackend"]
