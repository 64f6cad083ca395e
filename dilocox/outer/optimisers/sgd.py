"""Outer SGD, with heavy-ball or Nesterov momentum, and no optimiser at all. The steps themselves are the kernels'."""

from dilocox.errors import ConfigError
from dilocox.outer.apply import Apply
from dilocox.outer.merge.merged import Merged
from dilocox.outer.optimisers.protocol import Range
from dilocox_kernels.rules import OuterRule, Rule


class SGD:
    """θ ← θ − η Δ. With η = 1 the anchor becomes the mean of the islands' weights (local SGD)."""

    slots: tuple[str, ...] = ()

    def __init__(self, lr: float) -> None:
        self.lr = _positive("lr", lr)

    def advance(self, target: Range, merged: Merged, apply: Apply, step: int) -> int:
        rule = OuterRule(Rule.SGD, self.lr, momentum=0.0)
        return merged.outer_step(target.anchor, None, target.values, rule, apply.local_weight)


class Momentum:
    """b ← μ b + Δ; θ ← θ − η b."""

    slots: tuple[str, ...] = ("momentum",)
    rule = Rule.MOMENTUM

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = _positive("lr", lr)
        self.momentum = _below_one("momentum", momentum)

    def advance(self, target: Range, merged: Merged, apply: Apply, step: int) -> int:
        rule = OuterRule(self.rule, self.lr, self.momentum)
        return merged.outer_step(target.anchor, target.slots["momentum"], target.values, rule, apply.local_weight)


class Nesterov(Momentum):
    """b ← μ b + Δ; θ ← θ − η (Δ + μ b), as torch's SGD(nesterov=True): DiLoCo's outer step (arXiv 2311.08105)."""

    rule = Rule.NESTEROV


class Identity:
    """No outer optimiser: the merged payload is used as it is. For payloads that have no anchor to move."""

    slots: tuple[str, ...] = ()

    def advance(self, target: Range, merged: Merged, apply: Apply, step: int) -> int:
        raise ConfigError(
            "outer_optimizer",
            "none",
            "cannot move an anchor",
            "Choose nesterov, momentum, sgd or adam for displacements",
        )


def _positive(field: str, value: float) -> float:
    if value <= 0:
        raise ConfigError(f"outer_optimizer.{field}", value, "must be positive", "DiLoCo uses 0.7")
    return value


def _below_one(field: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"outer_optimizer.{field}", value, "must lie in [0, 1)", "DiLoCo uses 0.9")
    return value
