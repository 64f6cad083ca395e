"""The learning rate of the inner optimiser as a function of the inner step."""

import math
from dataclasses import dataclass

from dilocox.config import Decay, InnerConfig


@dataclass(frozen=True)
class InnerSchedule:
    """Linear warm-up to `lr`, then constant, linear or cosine decay to `lr · min_lr_ratio` at step `decay_steps`.

    Steps are inner steps, counted from 1 over the whole run: rounds do not restart it. After `decay_steps` the rate
    stays where it ended.
    """

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay: Decay
    decay_steps: int

    @staticmethod
    def of(inner: InnerConfig) -> "InnerSchedule":
        return InnerSchedule(inner.lr, inner.min_lr_ratio, inner.warmup_steps, inner.decay, inner.decay_steps)

    def at(self, step: int) -> float:
        """The learning rate of the `step`-th update, step = 1, 2, …"""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.decay is Decay.constant:
            return self.lr
        span = self.decay_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / span) if span > 0 else 1.0
        left = 1 - progress if self.decay is Decay.linear else 0.5 * (1 + math.cos(math.pi * progress))
        lowest = self.lr * self.min_lr_ratio
        return lowest + (self.lr - lowest) * left
