"""Shards as torch.distributed.checkpoint sees them: rectangles (chunks) of tensors that are named "kind/parameter"."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dilocox.errors import CheckpointError
from dilocox.shards import Box, Shard

Shards = Mapping[str, Sequence[Shard]]
"""Shards by kind, a word without a slash: "weights", "exp_avg", "anchor", …"""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of one tensor and this rank's memory of it, a view in the rectangle's shape."""

    key: str
    box: Box
    values: Tensor
    is_owner: bool
    """Whether this rank is the one of its replicas that saves it."""

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.box.offset)

    @property
    def storage(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offset), torch.Size(self.box.shape))

    def write_item(self) -> WriteItem:
        properties = TensorProperties(dtype=self.values.dtype)
        data = TensorWriteData(self.storage, properties, torch.Size(self.box.global_shape))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=data)


def cut(shards: Shards) -> list[Chunk]:
    """All shards as chunks. Of replicas one rank is the owner, another one for other tensors, to share the writing."""
    return [
        Chunk(
            key=tensor_key(kind, shard),
            box=box,
            values=shard.values[start - shard.start :][: box.numel].view(box.shape),
            is_owner=_is_owner(tensor_key(kind, shard), shard),
        )
        for kind, members in shards.items()
        for shard in members
        for start, box in shard.box.rectangles(shard.start, shard.stop)
    ]


def tensor_key(kind: str, shard: Shard) -> str:
    return f"{kind}/{shard.name}"


def _is_owner(key: str, shard: Shard) -> bool:
    if shard.replicas is None:
        return True
    return zlib.crc32(key.encode()) % dist.get_world_size(shard.replicas) == dist.get_rank(shard.replicas)


def describe(shards: Shards) -> dict[str, dict[str, Any]]:
    """By "kind/parameter": the global shape and the dtype, as the manifest holds them."""
    return {
        tensor_key(kind, shard): {
            "shape": list(shard.box.global_shape),
            "dtype": str(shard.values.dtype).removeprefix("torch."),
        }
        for kind, members in shards.items()
        for shard in members
    }


class ChunkSavePlanner(DefaultSavePlanner):
    """Saves the chunks that this rank owns; refuses chunks of different ranks that overlap or leave a gap."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._owned = {chunk.index: chunk for chunk in chunks if chunk.is_owner}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([chunk.write_item() for chunk in self._owned.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._owned[write_item.index].values


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Fills this rank's chunks in place from whatever chunks were saved."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        """What to read; raises CheckpointError when the checkpoint does not hold every element."""
        assert self.metadata is not None
        wanted: dict[str, list[Chunk]] = {}
        for chunk in self._chunks.values():
            wanted.setdefault(chunk.key, []).append(chunk)
        items: list[ReadItem] = []
        for key, chunks in wanted.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint holds no elements of {key}")
            reads = create_read_items_for_chunk_list(key, stored, [chunk.storage for chunk in chunks])
            found, needed = sum(prod(read.lengths) for read in reads), sum(chunk.box.numel for chunk in chunks)
            if found != needed:
                raise CheckpointError(f"the checkpoint holds {found} of the {needed} elements of {key} on this rank")
            items += reads
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._chunks[read_item.dest_index].values
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dimension, offset, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the reader has written through the view."""
