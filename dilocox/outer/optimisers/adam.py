"""Outer Adam."""

from collections.abc import Sequence

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.apply import Apply
from dilocox.outer.merge.merged import Merged
from dilocox.outer.optimisers.protocol import Range
from dilocox_kernels.checksum import checksum64


class Adam:
    """m ← β₁m + (1−β₁)Δ; v ← β₂v + (1−β₂)Δ²; θ ← θ − η m̂/(√v̂ + ε), bias-corrected (FedAdam, arXiv 2003.00295)."""

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: float, betas: Sequence[float], epsilon: float) -> None:
        if lr <= 0:
            raise ConfigError("outer_optimizer.lr", lr, "must be positive", "Try 0.3")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError("outer_optimizer.betas", list(betas), "must be two numbers in [0, 1)", "Try [0.9, 0.95]")
        if epsilon <= 0:
            raise ConfigError("outer_optimizer.epsilon", epsilon, "must be positive", "DiLoCo needed 0.1")
        self.lr = lr
        self.betas = (betas[0], betas[1])
        self.epsilon = epsilon

    def advance(self, target: Range, merged: Merged, apply: Apply, step: int) -> int:
        self._step(target.anchor, target.slots, merged.decode(), step)
        for part, local in zip(merged.codes.spans.cut(target.anchor), target.values, strict=True):
            apply.write(part, local)
        return checksum64(target.anchor, merged.start)

    def _step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
        first, second = slots["exp_avg"], slots["exp_avg_sq"]
        beta1, beta2 = self.betas
        first.mul_(beta1).add_(delta * (1 - beta1))
        second.mul_(beta2).add_(delta.mul_(delta).mul_(1 - beta2))
        denominator = (second / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        anchor.sub_((first / (1 - beta1**step)).mul_(self.lr).div_(denominator))
