"""Operations on made-up tensors: what tunes a kernel and what is compiled ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_kernels.formats import Format
from dilocox_kernels.gpu import launches
from dilocox_kernels.gpu.launches import Launch, Tiling
from dilocox_kernels.rules import OuterRule, Rule, Stochastic
from dilocox_kernels.spans import Spans

HEADER_BYTES = 128
"""Of a message, before a body: bodies start at 16-byte alignment."""


@dataclass(frozen=True)
class Sample:
    """An operation in the dtypes that training with bf16 weights has."""

    operation: str
    fmt: Format
    values: torch.dtype = torch.bfloat16
    residual: torch.dtype | None = torch.bfloat16
    stochastic: bool = False
    rule: Rule = Rule.NESTEROV
    local_weight: float = 0.0
    islands: int = 4

    def launches(self, spans: Spans, device: torch.device) -> Callable[[Tiling], list[Launch]]:
        """Launches of the operation over `spans` on tensors that stay the same."""
        numel = spans.numel
        values = [torch.zeros(stop - start, dtype=self.values, device=device) for start, stop in spans.bounds]
        anchor = torch.zeros(numel, device=device)
        rounding = Stochastic(1, 1) if self.stochastic else None
        bodies = [self._body(numel, device) for _ in range(self.islands)]
        weights = [1.0 / self.islands] * self.islands
        residual, residual_out = self._residual(numel, device), self._residual(numel, device)
        rule = OuterRule(self.rule, 0.7, 0.9)
        momentum = torch.zeros(numel, device=device) if rule.needs_momentum else None

        def started(tiling: Tiling) -> list[Launch]:
            if self.operation == "encode":
                return launches.encode(
                    self.fmt, values, spans, anchor, residual, 1.0, rounding, 0, bodies[0], residual_out, tiling
                )[0]
            if self.operation == "requantise":
                return launches.requantise(
                    self.fmt,
                    bodies[1:],
                    weights[1:],
                    spans,
                    residual,
                    1.0,
                    rounding,
                    0,
                    bodies[0],
                    residual_out,
                    tiling,
                )[0]
            if self.operation == "decode_accumulate":
                return launches.decode_accumulate(self.fmt, bodies, weights, spans, anchor, tiling)
            return launches.outer_step(
                self.fmt, bodies, weights, spans, anchor, momentum, values, rule, self.local_weight, 0, tiling
            )[0]

        return started

    def _body(self, numel: int, device: torch.device) -> Tensor:
        message = torch.zeros(HEADER_BYTES + self.fmt.encoded_bytes(numel), dtype=torch.uint8, device=device)
        return message[HEADER_BYTES:]

    def _residual(self, numel: int, device: torch.device) -> Tensor | None:
        return None if self.residual is None else torch.zeros(numel, dtype=self.residual, device=device)
