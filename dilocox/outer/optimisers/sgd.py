"""Outer SGD, with heavy-ball or Nesterov momentum, and no optimiser at all."""

from torch import Tensor

from dilocox.errors import ConfigError


class SGD:
    """θ ← θ − η Δ. With η = 1 the anchor becomes the mean of the islands' weights (local SGD)."""

    slots: tuple[str, ...] = ()

    def __init__(self, lr: float) -> None:
        self.lr = _positive("lr", lr)

    def step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
        anchor.sub_(delta.mul_(self.lr))


class Momentum:
    """b ← μ b + Δ; θ ← θ − η b."""

    slots: tuple[str, ...] = ("momentum",)

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = _positive("lr", lr)
        self.momentum = _below_one("momentum", momentum)

    def step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
        buffer = slots["momentum"]
        buffer.mul_(self.momentum).add_(delta)
        anchor.sub_(delta.copy_(buffer).mul_(self.lr))


class Nesterov:
    """b ← μ b + Δ; θ ← θ − η (Δ + μ b), as torch's SGD(nesterov=True): DiLoCo's outer step (arXiv 2311.08105)."""

    slots: tuple[str, ...] = ("momentum",)

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = _positive("lr", lr)
        self.momentum = _below_one("momentum", momentum)

    def step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
        buffer = slots["momentum"]
        buffer.mul_(self.momentum).add_(delta)
        delta.add_(buffer * self.momentum)
        anchor.sub_(delta.mul_(self.lr))


class Identity:
    """No outer optimiser: the merged payload is used as it is. For payloads that have no anchor to move."""

    slots: tuple[str, ...] = ()

    def step(self, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, step: int) -> None:
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
