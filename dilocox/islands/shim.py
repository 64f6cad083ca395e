"""Lets megatron-core run on a machine without CUDA; does nothing where CUDA is there.

Megatron names CUDA by hand in places that have nothing to do with a GPU (a scalar for the gradient norm, the seed of a
random stream). Each patch below lifts one such place. A `TorchFunctionMode` would be tidier but is off inside backward,
where activation recomputation calls factory functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "linspace", "eye", "as_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
)


def apply() -> None:
    """Patch torch and Megatron where CUDA is absent; a second call changes nothing."""
    if torch.cuda.is_available() or hasattr(torch.zeros, "__wrapped__"):
        return
    _patch_factories()
    _patch_tensor()
    _patch_cuda()
    _patch_megatron()


def _patch_factories() -> None:
    """`torch.zeros(1, device="cuda")` makes a CPU tensor: Megatron asks for scalars and buffers so."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapper


def _patch_tensor() -> None:
    original_type = Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    # The tied embedding is moved to the GPU before its first all-reduce.
    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # The optimizers sort parameters into fp32 and bf16 by comparing with "torch.cuda.FloatTensor".
    Tensor.type = type_name  # type: ignore[method-assign, assignment]


def _patch_cuda() -> None:
    # Passed as `device=` nearly everywhere.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    # Called after each batched point-to-point exchange of the pipeline.
    torch.cuda.synchronize = lambda device=None: None
    # The random streams of dropout and recomputation then work on the CPU generator as they do on the GPU's.
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random

    # They go past torch.cuda's public functions, into the CUDA generators.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
