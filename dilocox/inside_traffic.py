"""Predicted bytes inside an island: what each lane sends to others of its island, by the kind of parallelism.

Counted as `dilocox.traffic.InsideMeter` counts, by ring algorithms. Left out are single numbers (the loss, the norm of
the gradient, votes): together less than a kilobyte a step. Sources: Megatron's sequence parallelism (arXiv 2205.05198,
section 4.2.2) and what megatron-core does; a test compares with the meter.
"""

from dataclasses import dataclass

from dilocox.config import Config, Recompute
from dilocox.parameters import FP32, Holding, buffers, chunks, element_bytes, holdings
from dilocox.topology import Lane

CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class InsideTraffic:
    """Bytes that one lane sends inside its island: in an inner step by kind, and in a sync."""

    tensor: float
    pipeline: float
    data: float
    tied_embedding: float
    per_sync: float

    @property
    def per_step(self) -> float:
        return self.tensor + self.pipeline + self.data + self.tied_embedding


def predict_inside(config: Config, vocab_size: int, lane: Lane) -> InsideTraffic:
    """What the rank at `lane` sends; evaluation is not included. `vocab_size` is the tokenizer's."""
    return InsideTraffic(
        tensor=_tensor(config, vocab_size, lane),
        pipeline=_pipeline(config, lane),
        data=_data(config, vocab_size, lane),
        tied_embedding=_tied(config, vocab_size, lane),
        per_sync=_sync(config, vocab_size, lane),
    )


def _activation(config: Config) -> int:
    """Bytes of one microbatch's hidden states, [sequence, microbatch, hidden]."""
    model = config.model
    return model.sequence_length * config.island.micro_batch_size * model.hidden_size * element_bytes(config)


def _tensor(config: Config, vocab_size: int, lane: Lane) -> float:
    """Counted in passes: reduce-scatters or all-gathers of one microbatch's hidden states over tp.

    A layer has 4 in forward and 4 in backward; sequence parallelism gathers the inputs of both column-parallel matrices
    once more for their gradients, full recomputation runs forward again.
    """
    model, island = config.model, config.island
    if island.tp == 1:
        return 0.0
    stages, depth = island.pp, model.layers // island.pp
    regather = 1 if island.sequence_parallel else 0
    forward_again = 4 if island.recompute is Recompute.full else 0
    passes = depth * (4 + 4 + 2 * regather + forward_again)
    numbers = 0
    if lane.pp == 0:
        passes += 1 + 1 if island.sequence_parallel else 2  # embedding: scattered and gathered, or all-reduced
    if lane.pp == stages - 1:
        passes += 1 + 2 if island.sequence_parallel else 2  # output layer
        numbers = 3 * 2 * model.sequence_length * island.micro_batch_size * FP32  # cross entropy: 3 all-reduces
    norms = 0
    if island.sequence_parallel:
        held = (parameter for chunk in chunks(config, vocab_size, lane) for parameter in chunk)
        norms = 2 * FP32 * sum(parameter.numel for parameter in held if len(parameter.shape) == 1)
    return _share(island.tp) * (island.microbatches * (passes * _activation(config) + numbers) + norms)


def _pipeline(config: Config, lane: Lane) -> float:
    """Hidden states to the next chunk of layers, gradients to the one before."""
    island = config.island
    if island.pp == 1:
        return 0.0
    forward = island.virtual_pp - (1 if lane.pp == island.pp - 1 else 0)
    backward = island.virtual_pp - (1 if lane.pp == 0 else 0)
    split = island.tp if island.sequence_parallel else 1
    return island.microbatches * (forward + backward) * _activation(config) / split


def _data(config: Config, vocab_size: int, lane: Lane) -> float:
    """fp32 gradients all-reduced; or reduce-scattered, and weights gathered in their own precision."""
    numel = sum(buffer.numel for buffer in buffers(config, vocab_size, lane))
    back = element_bytes(config) if config.island.distributed_optimizer else FP32
    return _share(config.island.dp) * numel * (FP32 + back)


def _tied(config: Config, vocab_size: int, lane: Lane) -> float:
    """The gradient of a tied embedding, summed over the first and the last stage."""
    held = (parameter for chunk in chunks(config, vocab_size, lane) for parameter in chunk)
    return sum(2 * _share(2) * FP32 * parameter.numel for parameter in held if parameter.at_both_ends)


def _sync(config: Config, vocab_size: int, lane: Lane) -> float:
    """Owners' parts broadcast to other holders, checksums compared, and weights gathered by the distributed optimizer.

    A broadcast counts (n−1)/n at each rank, the mean over the group.
    """
    owned = holdings(config, vocab_size, lane)
    gathered = 0.0
    if config.island.distributed_optimizer:
        numel = sum(buffer.numel for buffer in buffers(config, vocab_size, lane))
        gathered = _share(config.island.dp) * numel * element_bytes(config)
    return gathered + sum(_handed_over(holding) for holding in owned)


def _handed_over(holding: Holding) -> float:
    return _share(holding.replicas) * FP32 * holding.numel + (holding.replicas - 1) * CHECKSUM_BYTES


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
