"""Means over islands, uniform or weighted."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.codecs.protocol import Codec
from dilocox_kernels.wire import Header


class Merge(Protocol):
    """Combines the islands' pseudo-gradients. What it decides must follow from headers alone, so that all lanes of
    all islands decide alike."""

    def weights(self, headers: Sequence[Header]) -> list[float]:
        """A weight for each island, from the headers of its messages, in island order; they sum to 1."""

    def combine(self, codec: Codec, bodies: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the merged fp32 pseudo-gradient into `out`; bodies come in island order, so all get the same bits.

        `bodies` lie in host memory, `out` where the outer state lives.
        """


class Mean:
    """Δ = Σ Δ_k / K, accumulated in fp32 in island order."""

    def weights(self, headers: Sequence[Header]) -> list[float]:
        return [1.0 / len(headers)] * len(headers)

    def combine(self, codec: Codec, bodies: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        out.zero_()
        for body, weight in zip(bodies, weights, strict=True):
            codec.decode_accumulate(body.to(out.device), weight, out)


class WeightedMean(Mean):
    """Δ = Σ n_k Δ_k / Σ n_k, n_k being what island k trained on since the last sync, or the size of its shard.

    FedAvg (arXiv 1602.05629, algorithm 1) weights by the size of the shard.
    """

    def __init__(self, by: str) -> None:
        if by not in ("tokens", "steps", "documents"):
            raise ConfigError("merge.by", by, "not known", "Choose tokens, steps or documents")
        self.by = by

    def weights(self, headers: Sequence[Header]) -> list[float]:
        counts = {
            "tokens": [header.tokens for header in headers],
            "steps": [header.steps for header in headers],
            "documents": [header.documents for header in headers],
        }[self.by]
        total = sum(counts)
        if total == 0:
            raise ConfigError(
                "merge.by",
                self.by,
                "all islands report a count of zero",
                "Report counts to the outer loop, or use mean",
            )
        return [count / total for count in counts]
