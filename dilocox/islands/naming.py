"""Global names and boxes of a rank's parameters: the same element has the same name and index at every layout."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from dilocox.shards import Box

if TYPE_CHECKING:
    from dilocox.islands.mcore import GPTModel

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of this rank, and what it is a part of."""

    name: str
    box: Box
    parameter: nn.Parameter
    split_over_tp: bool
    at_both_ends: bool
    """A tied embedding of a pipelined model: the first and the last stage hold it, under one name."""


def name_parameters(
    chunks: Iterable["GPTModel"], *, tied_embeddings: bool, tp: int, tp_rank: int, pp: int
) -> list[NamedParameter]:
    """All parameters of a rank's model chunks (unwrapped GPTModels) in the order of the model.

    The order is that of the model at every layout: a tied embedding comes first on the last stage too. So ranks that
    walk their lists and meet replicas of one parameter meet them in the same order, and cannot wait for each other in
    a circle.
    """
    named = []
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for local, parameter in chunk.named_parameters():
            name = global_name(local, numbers, tied_embeddings)
            split = bool(getattr(parameter, "tensor_model_parallel", False)) and tp > 1
            dimension = getattr(parameter, "partition_dim", None) if split else None
            box = global_box(name, tuple(parameter.shape), dimension, tp, tp_rank)
            at_both_ends = name == EMBEDDING and tied_embeddings and pp > 1
            named.append(NamedParameter(name, box, parameter, split, at_both_ends))
    return sorted(named, key=lambda entry: entry.name != EMBEDDING)


def global_name(local: str, layers: Sequence[int], tied_embeddings: bool) -> str:
    """The name in the whole model: `layers` gives the global index of each local layer.

    >>> global_name("decoder.layers.0.mlp.linear_fc1.weight", [6, 7], False)
    'decoder.layers.6.mlp.linear_fc1.weight'
    """
    if local == OUTPUT and tied_embeddings:
        return EMBEDDING
    return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(layers[int(match[0])]), local)


def global_box(name: str, shape: tuple[int, ...], split: int | None, tp: int, tp_rank: int) -> Box:
    """Where a local parameter of `shape` lies in the whole one, split over tp along dimension `split` (None: not).

    Megatron's fc1 of SwiGLU holds [gate of this rank; up of this rank], which is no slice of [gate; up]: its global
    shape is [2, ffn, hidden], of which a rank holds a slice along ffn.
    """
    if name.endswith("linear_fc1.weight"):
        shape = (2, shape[0] // 2, shape[1])
        split = None if split is None else 1
    offset = [0] * len(shape)
    whole = list(shape)
    if split is not None:
        offset[split] = tp_rank * shape[split]
        whole[split] = tp * shape[split]
    return Box(tuple(whole), tuple(offset), shape)
