"""Means over islands, uniform or weighted."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.codecs.protocol import Codec, Codes, Destination, Norms, Origin
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.rules import OuterRule
from dilocox_kernels.wire import Header


class Merge(Protocol):
    """Combines the islands' pseudo-gradients, still in codes, for each use that there is of them.

    What it decides must follow from headers alone, so that all lanes of all islands decide alike.
    """

    def weights(self, headers: Sequence[Header]) -> list[float]:
        """A weight for each island, from the headers of its messages, in island order; they sum to 1."""

    def decode(self, codec: Codec, kernels: Kernels, codes: Codes, out: Tensor) -> None:
        """Write the merged pseudo-gradient into fp32 `out` [numel]; gaps become zeros."""

    def requantise(
        self, codec: Codec, kernels: Kernels, codes: Codes, origin: Origin, destination: Destination
    ) -> Norms:
        """Encode the merged pseudo-gradient again."""

    def outer_step(
        self,
        codec: Codec,
        kernels: Kernels,
        codes: Codes,
        *,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
    ) -> int:
        """Move the anchor by the merged pseudo-gradient and write the local `values`; returns the anchor's checksum."""


class Mean:
    """Δ = Σ Δ_k / K, accumulated in fp32 in island order; being linear, it is fused with whatever uses it."""

    def weights(self, headers: Sequence[Header]) -> list[float]:
        return [1.0 / len(headers)] * len(headers)

    def decode(self, codec: Codec, kernels: Kernels, codes: Codes, out: Tensor) -> None:
        codec.decode(kernels, codes, out)

    def requantise(
        self, codec: Codec, kernels: Kernels, codes: Codes, origin: Origin, destination: Destination
    ) -> Norms:
        return codec.requantise(kernels, codes, origin, destination)

    def outer_step(
        self,
        codec: Codec,
        kernels: Kernels,
        codes: Codes,
        *,
        anchor: Tensor,
        momentum: Tensor | None,
        values: Sequence[Tensor],
        rule: OuterRule,
        local_weight: float,
    ) -> int:
        return codec.outer_step(
            kernels,
            codes,
            anchor=anchor,
            momentum=momentum,
            values=values,
            rule=rule,
            local_weight=local_weight,
        )


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
