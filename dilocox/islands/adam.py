"""Which AdamW runs inside an island: Transformer Engine's, NVIDIA apex's, or torch's; and the apex that is not apex.

Megatron takes whichever it can import, in silence, and falls back to an unfused one. Here it is chosen, named, and
refused when it cannot be had.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dilocox.config import AdamImplementation
from dilocox.errors import ConfigError

FIELD = "inner.implementation"


class FusedTorchAdamW(torch.optim.AdamW):
    """torch's fused AdamW under the signature by which Megatron constructs apex's and Transformer Engine's."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        if not adam_w_mode:
            raise ValueError("FusedTorchAdamW decays weights apart from the gradient: adam_w_mode must be True")
        super().__init__(params, fused=True, **settings)


@dataclass(frozen=True)
class AdamChoice:
    """The AdamW that runs, and its name for people and records."""

    name: str
    optimizer: type


def refuse_apex_impostor() -> None:
    """Raise ConfigError when the installed `apex` is PyPI's unrelated package.

    Megatron takes any importable `apex` for NVIDIA's, so call this before the first import of Megatron; it looks at
    files and imports nothing.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "optimizers").is_dir() or (folder / "optimizers.py").is_file() for folder in folders):
        return
    raise ConfigError(
        "apex",
        spec.origin,
        "this is not NVIDIA's apex (it has no apex.optimizers) but an unrelated package of that name from PyPI, "
        "which Megatron would take for it",
        "Run `pip uninstall apex`; NVIDIA's is built from https://github.com/NVIDIA/apex",
    )


def choose_adam(wanted: AdamImplementation, device: torch.device) -> AdamChoice:
    """The AdamW to run on `device`; ConfigError when one was asked for by name and cannot be had."""
    finders: dict[AdamImplementation, Callable[[], AdamChoice]] = {
        AdamImplementation.transformer_engine: _transformer_engine,
        AdamImplementation.apex: _apex,
        AdamImplementation.torch: _torch,
    }
    on_gpu = device.type == "cuda"
    if wanted is AdamImplementation.auto:
        for implementation in (AdamImplementation.transformer_engine, AdamImplementation.apex) if on_gpu else ():
            try:
                return finders[implementation]()
            except ConfigError:
                continue
        return _torch()
    if wanted is not AdamImplementation.torch and not on_gpu:
        raise ConfigError(
            FIELD, wanted.value, f"runs on GPUs only, and this island is on {device}", f"Set {FIELD}=torch or auto"
        )
    return finders[wanted]()


def _torch() -> AdamChoice:
    return AdamChoice(f"torch {torch.__version__} AdamW (fused)", FusedTorchAdamW)


def _transformer_engine() -> AdamChoice:
    return AdamChoice(
        "Transformer Engine FusedAdam", _fused_adam("transformer_engine.pytorch.optimizers", "transformer_engine")
    )


def _apex() -> AdamChoice:
    if importlib.util.find_spec("amp_C") is None:
        raise ConfigError(
            FIELD, "apex", "apex with its CUDA extensions is not installed", f"Build it, or set {FIELD}=auto"
        )
    return AdamChoice("apex FusedAdam", _fused_adam("apex.optimizers", "apex"))


def _fused_adam(module: str, wanted: str) -> type:
    try:
        found: type = importlib.import_module(module).FusedAdam
    except ImportError as error:
        raise ConfigError(FIELD, wanted, f"cannot be imported ({error})", f"Install it, or set {FIELD}=auto") from error
    return found
