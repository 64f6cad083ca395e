"""Which parameters a lane holds, and which part of them it owns, as sizes: known before anything is built.

It mirrors what megatron-core builds for a Llama-style model (`dilocox.islands`), so that memory and traffic can be told
in advance; tests compare it with islands that were built.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

import torch

from dilocox.config import Config, Device, ModelConfig, Precision
from dilocox.topology import Lane

FP32 = 4
"""Bytes of an element."""
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of a rank, in its local shape."""

    name: str
    shape: tuple[int, ...]
    split_over_tp: bool
    at_both_ends: bool
    """A tied embedding of a pipelined model, which the first and the last stage hold."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Holding:
    """The elements of one parameter that a rank's optimizer steps, and how many ranks hold exactly these.

    `index` is this rank's place among the `replicas` ranks; `group` names the dimensions over which they differ.
    """

    name: str
    numel: int
    group: tuple[str, ...]
    replicas: int
    index: int


@dataclass(frozen=True)
class Buffer:
    """Megatron's flat buffer of one model chunk: elements with padding, and the range of each parameter in it."""

    numel: int
    bounds: list[tuple[LocalParameter, int, int]]
    buckets: list[tuple[int, int]]


def uses_gpu(config: Config) -> bool:
    """Whether ranks run on GPUs; device=auto looks at this machine."""
    return config.device is Device.cuda or (config.device is Device.auto and torch.cuda.is_available())


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation: precision=auto is bf16 on GPUs and fp32 on CPUs."""
    precision = config.island.precision
    bf16 = precision is Precision.bf16 or (precision is Precision.auto and uses_gpu(config))
    return 2 if bf16 else FP32


def total_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Elements of the whole model, a tied embedding counted once."""
    attention = model.hidden_size * (2 * model.hidden_size + 2 * _kv_size(model))
    layer = attention + 3 * model.hidden_size * model.ffn_hidden_size + 2 * model.hidden_size
    ends = 1 if model.tied_embeddings else 2
    embeddings = ends * model.padded_vocab(vocab_size) * model.hidden_size
    return model.layers * layer + embeddings + model.hidden_size


def chunks(config: Config, vocab_size: int, lane: Lane) -> list[list[LocalParameter]]:
    """The parameters of each model chunk of a lane, in the order of the model."""
    model, island = config.model, config.island
    tp = island.tp
    vocab = LocalParameter(
        EMBEDDING,
        (model.padded_vocab(vocab_size) // tp, model.hidden_size),
        tp > 1,
        model.tied_embeddings and island.pp > 1,
    )
    norm = LocalParameter("decoder.final_layernorm.weight", (model.hidden_size,), False, False)
    per_chunk = model.layers // (island.pp * island.virtual_pp)
    held = []
    for chunk in range(island.virtual_pp):
        first = (chunk * island.pp + lane.pp) * per_chunk
        here = [vocab] if first == 0 else []
        for layer in range(first, first + per_chunk):
            here += _layer(model, tp, layer)
        if first + per_chunk == model.layers:
            here.append(norm)
            if not model.tied_embeddings:
                here.append(LocalParameter("output_layer.weight", vocab.shape, tp > 1, False))
            elif island.pp > 1:
                here.append(vocab)
        held.append(here)
    return held


def _kv_size(model: ModelConfig) -> int:
    return model.hidden_size // model.heads * model.kv_heads


def _layer(model: ModelConfig, tp: int, index: int) -> list[LocalParameter]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    shapes = {
        "input_layernorm": (hidden,),
        "self_attention.linear_proj": (hidden, hidden // tp),
        "self_attention.linear_qkv": ((hidden + 2 * _kv_size(model)) // tp, hidden),
        "pre_mlp_layernorm": (hidden,),
        "mlp.linear_fc1": (2 * ffn // tp, hidden),
        "mlp.linear_fc2": (hidden, ffn // tp),
    }
    return [
        LocalParameter(f"decoder.layers.{index}.{name}.weight", shape, len(shape) > 1 and tp > 1, False)
        for name, shape in shapes.items()
    ]


def buffers(config: Config, vocab_size: int, lane: Lane) -> list[Buffer]:
    """Megatron's gradient buffers, one a model chunk; with the distributed optimizer the weights lie in such, too."""
    return [_buffer(config, parameters) for parameters in chunks(config, vocab_size, lane)]


def _buffer(config: Config, parameters: list[LocalParameter]) -> Buffer:
    """Parameters follow each other from the last to the first.

    The distributed optimizer starts each at a multiple of 64 elements, ends a bucket at a multiple of 128 and of dp,
    and gives the embedding of a tied pipeline a bucket of its own.
    """
    distributed = config.island.distributed_optimizer
    align, end_align = (64, lcm(config.island.dp, 128)) if distributed else (1, 1)
    bounds, buckets = [], []
    position = bucket_start = 0

    def close_bucket() -> None:
        nonlocal position, bucket_start
        position = _round_up(position, end_align)
        buckets.append((bucket_start, position))
        bucket_start = position

    for parameter in reversed(parameters):
        position = _round_up(position, align)
        alone = distributed and parameter.at_both_ends
        if alone and position > bucket_start:
            close_bucket()
        bounds.append((parameter, position, position + parameter.numel))
        position += parameter.numel
        if alone:
            close_bucket()
    if position > bucket_start:
        close_bucket()
    return Buffer(position, bounds, buckets)


def holdings(config: Config, vocab_size: int, lane: Lane) -> list[Holding]:
    """What a lane lends to the outer loop, as `Island.weights()` will."""
    return [
        _holding(config, lane, parameter, stop - start)
        for buffer in buffers(config, vocab_size, lane)
        for parameter, start, stop in _owned_ranges(config, lane, buffer)
    ]


def _owned_ranges(config: Config, lane: Lane, buffer: Buffer) -> Iterator[tuple[LocalParameter, int, int]]:
    if not config.island.distributed_optimizer:
        yield from buffer.bounds
        return
    for first, last in buffer.buckets:
        part = (last - first) // config.island.dp
        low, high = first + lane.dp * part, first + (lane.dp + 1) * part
        for parameter, start, stop in buffer.bounds:
            if max(start, low) < min(stop, high):
                yield parameter, max(start, low), min(stop, high)


def _holding(config: Config, lane: Lane, parameter: LocalParameter, numel: int) -> Holding:
    island = config.island
    dimensions = {
        "ends": (2, int(lane.pp > 0)) if parameter.at_both_ends else (1, 0),
        "dp": (1, 0) if island.distributed_optimizer else (island.dp, lane.dp),
        "tp": (1, 0) if parameter.split_over_tp else (island.tp, lane.tp),
    }
    index, replicas = 0, 1
    for size, place in dimensions.values():
        index, replicas = index * size + place, replicas * size
    group = tuple(name for name, (size, _) in dimensions.items() if size > 1)
    return Holding(parameter.name, numel, group, replicas, index)


def flat_numel(held: list[Holding], alignment: int) -> int:
    """Length of the flat buffer in which a lane exchanges what it owns (see `dilocox.outer.fragments`)."""
    blocks: defaultdict[tuple[tuple[str, ...], int, int], int] = defaultdict(int)
    for holding in held:
        blocks[holding.group, holding.replicas, holding.index] += -(-holding.numel // alignment)
    return alignment * sum(
        total * (index + 1) // replicas - total * index // replicas for (_, replicas, index), total in blocks.items()
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
