"""An island that runs megatron-core: tensor, pipeline, sequence and data parallelism over one world of ranks."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilocox.config import InnerConfig, IslandConfig, ModelConfig, Precision
from dilocox.errors import ConfigError
from dilocox.islands.initialise import initialise
from dilocox.islands.inner_schedule import InnerSchedule
from dilocox.islands.mcore import get_forward_backward_func
from dilocox.islands.model import build_chunks
from dilocox.islands.naming import NamedParameter, name_parameters
from dilocox.islands.optimizer import InnerOptimiser, Owned
from dilocox.islands.world import RandomStream, World
from dilocox.shards import Shard


class MegatronIsland:
    """One island's model, inner optimiser and schedule; implements `dilocox.islands.protocol.Island`.

    Several of them may share a world and take turns. The constructor is collective. `vocab_size` is the tokenizer's;
    `seed` must be the same on all islands, so that they start from one anchor.
    """

    def __init__(
        self,
        world: World,
        *,
        model: ModelConfig,
        island: IslandConfig,
        inner: InnerConfig,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.layout, self.lane, self.group = world.layout, world.lane, world.group
        self.precision = resolve_precision(island.precision, world.device)
        self._world = world
        self._island = island
        self._schedule = InnerSchedule.of(inner)
        self._steps = 0
        self.random = RandomStream(seed)
        with self.random.turn():
            self._chunks = build_chunks(model, island, self.precision, vocab_size, world)
            self._optimiser = InnerOptimiser(
                self._chunks, inner, self.precision, island.distributed_optimizer, world.device
            )
        self._named = name_parameters(
            [_unwrapped(chunk) for chunk in self._chunks],
            tied_embeddings=model.tied_embeddings,
            tp=self.layout.tp,
            tp_rank=self.lane.tp,
            pp=self.layout.pp,
        )
        self._owned = self._optimiser.owned()
        self._weights = [self._shard(entry, owned.main) for entry, owned in self._parts()]
        initialise(self._weights, model, seed)
        self.publish()

    @property
    def inner_optimizer_name(self) -> str:
        """Which AdamW or SGD runs."""
        return self._optimiser.name

    @property
    def learning_rate(self) -> float:
        """The inner learning rate of the next update."""
        return self._schedule.at(self._steps + 1)

    def forward_backward(self, microbatches: Iterable[Tensor]) -> float:
        with self.random.turn():
            self._optimiser.zero_grad()
            return self._run(list(microbatches), forward_only=False)

    def update(self) -> float:
        norm = self._optimiser.step(self.learning_rate)
        self._steps += 1
        return norm

    def evaluate(self, microbatches: Iterable[Tensor]) -> float:
        for chunk in self._chunks:
            chunk.eval()
        try:
            with self.random.turn(), torch.no_grad():
                return self._run(list(microbatches), forward_only=True)
        finally:
            for chunk in self._chunks:
                chunk.train()

    def weights(self) -> list[Shard]:
        return list(self._weights)

    def gradients(self) -> list[Shard]:
        return [
            self._shard(entry, _main_grad(entry.parameter).view(-1)[owned.start : owned.stop])
            for entry, owned in self._parts()
        ]

    def publish(self) -> None:
        self._optimiser.publish()

    def optimizer_state(self) -> dict[str, list[Shard]]:
        return {
            kind: [self._shard(entry, self._optimiser.moments(owned.main)[kind]) for entry, owned in self._parts()]
            for kind in self._optimiser.kinds
        }

    def state(self) -> dict[str, object]:
        return {"inner_steps": self._steps}

    def load_state(self, state: Mapping[str, object]) -> None:
        steps = state["inner_steps"]
        assert isinstance(steps, int)
        self._steps = steps
        self._optimiser.set_steps(steps)

    def _parts(self) -> Iterator[tuple[NamedParameter, Owned]]:
        """Named parameters of which this rank owns a part, in the order of the model."""
        return ((entry, self._owned[entry.parameter]) for entry in self._named if entry.parameter in self._owned)

    def _shard(self, entry: NamedParameter, values: Tensor) -> Shard:
        owned = self._owned[entry.parameter]
        replicas = self._world.replicas(
            tp=not entry.split_over_tp, dp=not self._island.distributed_optimizer, ends=entry.at_both_ends
        )
        return Shard(entry.name, entry.box, owned.start, owned.stop, values.detach().view(-1), replicas)

    def _run(self, batches: list[Tensor], *, forward_only: bool) -> float:
        """Send microbatches through the pipeline; the loss, averaged over the island, on every rank."""
        self._check(batches)
        interleaved = self._island.virtual_pp > 1
        run = get_forward_backward_func(self.layout.pp, self._island.virtual_pp if interleaved else None)
        losses = run(
            forward_step_func=self._forward_step,
            data_iterator=[iter(batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(batches),
            micro_batch_size=batches[0].shape[0],
            seq_length=batches[0].shape[1] - 1,
            forward_only=forward_only,
        )
        return self._island_mean(losses)

    def _check(self, batches: list[Tensor]) -> None:
        if not batches or any(batch.shape != batches[0].shape for batch in batches):
            raise ValueError(f"expected microbatches of one shape, got {[tuple(batch.shape) for batch in batches]}")
        if self._island.virtual_pp > 1 and len(batches) % self.layout.pp:
            raise ConfigError(
                "microbatches",
                len(batches),
                f"the interleaved pipeline takes multiples of pp={self.layout.pp}",
                "Change island.batch_size or evaluation.batches, or set island.virtual_pp=1",
            )

    def _forward_step(self, batches: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, object]:
        tokens = next(batches).to(self._world.device, non_blocking=True)
        output = chunk(input_ids=tokens[:, :-1], position_ids=None, attention_mask=None, labels=tokens[:, 1:])
        return output, _mean_loss

    def _island_mean(self, losses: list[Tensor]) -> float:
        """The last stage alone knows losses, and its tp ranks know the same ones: of each dp rank's, tp rank 0 adds its
        mean to one all-reduce, which every rank of the island reads."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if losses and self.lane.tp == 0:
            total += torch.stack(losses).double().mean() / self.layout.dp
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total.item()


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """What `auto` means on a device: bf16 on GPUs, fp32 on CPUs."""
    if precision is not Precision.auto:
        return precision
    return Precision.bf16 if device.type == "cuda" else Precision.fp32


def _main_grad(parameter: nn.Parameter) -> Tensor:
    """The fp32 gradient that Megatron's DDP keeps beside a parameter."""
    grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return grad


def _mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a microbatch, and a copy to report: the schedule divides the first in place."""
    loss = losses.mean()
    return loss, loss.detach().clone()


def _unwrapped(chunk: nn.Module) -> nn.Module:
    while isinstance(inside := getattr(chunk, "module", None), nn.Module):
        chunk = inside
    return chunk
