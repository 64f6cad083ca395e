"""The Triton back end, for NVIDIA and AMD GPUs. Nothing outside this folder imports triton.

`TritonBackend(torch.device("cuda"))` is a `Backend`; `python -m dilocox_kernels.gpu.report` says what its kernels
compile to, without a GPU. Importing this raises BackendError where triton is missing.
"""

from dilocox_kernels.backend import BackendError

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    raise BackendError("kernels=triton: triton is not installed; pip install 'dilocox[triton]'") from error

from dilocox_kernels.gpu.backend import TritonBackend

__all__ = ["TritonBackend"]
