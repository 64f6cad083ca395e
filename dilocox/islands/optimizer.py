"""Megatron's optimizers seen as shards: main weights, gradients and moments of the ranges that this rank owns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilocox.config import InnerConfig, InnerOptimizer, Precision
from dilocox.errors import ConfigError
from dilocox.islands.adam import choose_adam
from dilocox.islands.mcore import (
    DistributedDataParallel,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
    optimizer_module,
)


@dataclass(frozen=True)
class Owned:
    """The flat range [start, stop) of a model parameter that this rank's optimizer steps, and the tensor it steps."""

    main: Tensor
    start: int
    stop: int


class FusedTorchSGD(torch.optim.SGD):
    """torch's fused SGD under the arguments by which Megatron constructs one."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, fused=True, **settings)


class InnerOptimiser:
    """Megatron's optimizer of one island: AdamW or SGD, plain or distributed, with fp32 main weights under bf16."""

    name: str
    """What runs, for people and records."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        inner: InnerConfig,
        precision: Precision,
        distributed: bool,
        device: torch.device,
    ) -> None:
        if distributed and inner.optimizer is not InnerOptimizer.adamw:
            raise ConfigError(
                "island.distributed_optimizer",
                True,
                f"Megatron's works with AdamW only, not with inner.optimizer={inner.optimizer.value}",
                "Set it to false",
            )
        self.name = _choose(inner, device)
        self._chunks = chunks
        self._distributed = distributed
        self._weight_decay = inner.weight_decay
        self._clips = inner.clip_grad > 0
        config = OptimizerConfig(
            optimizer="adam" if inner.optimizer is InnerOptimizer.adamw else "sgd",
            lr=inner.lr,
            weight_decay=inner.weight_decay,
            adam_beta1=inner.betas[0],
            adam_beta2=inner.betas[1],
            adam_eps=inner.epsilon,
            sgd_momentum=inner.betas[0],
            clip_grad=inner.clip_grad,
            bf16=precision is Precision.bf16,
            params_dtype=torch.bfloat16 if precision is Precision.bf16 else torch.float32,
            use_distributed_optimizer=distributed,
        )
        chained = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        (self._megatron,) = chained.chained_optimizers
        self.kinds = _kinds(inner)
        _materialise(self._megatron.optimizer, self.kinds)

    def owned(self) -> dict[nn.Parameter, Owned]:
        """By model parameter, the part of it that this rank steps."""
        optimizer = self._megatron
        if isinstance(optimizer, DistributedOptimizer):
            models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
            mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
            models = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
            mains = [*optimizer.fp32_from_float16_groups, *optimizer.fp32_from_fp32_groups]
        else:
            assert isinstance(optimizer, FP32Optimizer)
            models = mains = [group["params"] for group in optimizer.param_groups]
        owned = {}
        for model_group, main_group in zip(models, mains, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                start = optimizer._get_model_param_range_map(parameter)["param"].start if self._distributed else 0
                owned[parameter] = Owned(main, start, start + main.numel())
        return owned

    def moments(self, main: Tensor) -> dict[str, Tensor]:
        """The inner optimiser's tensors of one owned main weight, by kind."""
        state = self._megatron.optimizer.state[main]
        return {kind: state[kind] for kind in self.kinds}

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, lr: float) -> float:
        """Clip, step, and make the model see the result; returns the norm of the unclipped gradient of the island."""
        for group in self._megatron.param_groups:
            group["lr"] = lr
            # Megatron leaves it to its scheduler to spare norms (wd_mult 0).
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        _, norm, _ = self._megatron.step()
        return float(norm if self._clips else self._megatron.get_grad_norm())

    def publish(self) -> None:
        """Copy main weights to the model, and gather over dp what the distributed optimizer keeps in parts."""
        if isinstance(self._megatron, FP32Optimizer):
            return  # the model's weights are the main weights
        with torch.no_grad():
            self._megatron._copy_main_params_to_model_params()
        if self._distributed:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def set_steps(self, steps: int) -> None:
        """Make AdamW's bias correction count `steps` updates as done."""
        optimizer = self._megatron.optimizer
        for group in optimizer.param_groups:
            if "step" in group:  # Transformer Engine and apex count by group
                group["step"] = steps
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _choose(inner: InnerConfig, device: torch.device) -> str:
    """Put the chosen optimizer where Megatron looks for it; returns its name."""
    # False makes Megatron construct the class below, and not torch's AdamW unfused.
    optimizer_module.USING_PYTORCH_OPTIMIZER = False
    if inner.optimizer is InnerOptimizer.sgd:
        optimizer_module.SGD = FusedTorchSGD
        return f"torch {torch.__version__} SGD (fused)"
    choice = choose_adam(inner.implementation, device)
    optimizer_module.Adam = distrib_optimizer.Adam = choice.optimizer
    return choice.name


def _kinds(inner: InnerConfig) -> tuple[str, ...]:
    if inner.optimizer is InnerOptimizer.adamw:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if inner.betas[0] else ()


def _materialise(optimizer: torch.optim.Optimizer, kinds: tuple[str, ...]) -> None:
    """Create the moments now, as zeros, and torch's step counts, as the first step would."""
    for group in optimizer.param_groups:
        for main in group["params"]:
            optimizer.state[main] = {kind: torch.zeros_like(main, requires_grad=False) for kind in kinds}
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[main]["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
        if kinds == ("exp_avg", "exp_avg_sq") and not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = 0
