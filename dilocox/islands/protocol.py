"""What the training loop asks of an island, whatever engine runs inside it."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from dilocox.shards import Shard
from dilocox.topology import Lane, Layout


class Island(Protocol):
    """A complete model-parallel job that could train by itself.

    All methods are collective: every rank of the island calls them in the same order.
    """

    layout: Layout
    lane: Lane
    group: ProcessGroup | None
    """All ranks of this island; None when the island is one rank."""

    def forward_backward(self, microbatches: Iterable[Tensor]) -> float:
        """Accumulate gradients over int64 [micro_batch, sequence + 1] token tensors of this data parallel rank.

        Returns the loss, averaged over the whole island and equal on all its ranks, in nats a token.
        """

    def update(self) -> float:
        """Take one inner optimiser step, with clipping and the inner schedule; returns the gradient norm."""

    def evaluate(self, microbatches: Iterable[Tensor]) -> float:
        """The loss without training, averaged over microbatches and data parallel ranks, equal on all ranks."""

    def weights(self) -> list[Shard]:
        """The main weights (fp32 where the optimizer keeps such), each element on one rank or on its replicas."""

    def gradients(self) -> list[Shard]:
        """The gradients behind `weights`, valid between `forward_backward` and `update`."""

    def publish(self) -> None:
        """Make the model see main weights that were written from outside: cast, and gather inside the island."""

    def optimizer_state(self) -> dict[str, list[Shard]]:
        """The inner optimiser's tensors by kind ("exp_avg", "exp_avg_sq"), laid out as `weights`.

        They exist before the first step (as zeros), so that a checkpoint can be loaded into them in place.
        """

    def state(self) -> dict[str, object]:
        """What a resumed island needs besides shards: step counts and the inner schedule; JSON-able."""

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take up `state()` of a checkpoint; shards are loaded in place and followed by `publish`."""
