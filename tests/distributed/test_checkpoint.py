"""Checkpoints of an island of four ranks (tp 2 × dp 2), with replicas, and what other layouts can load of them."""

from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dilocox import checkpoint
from dilocox.errors import CheckpointError
from dilocox.shards import Box, Shard, whole_shard
from tests.distributed.ranks import run_ranks

SHAPES = {"embedding.weight": (6, 4), "projection.weight": (4, 6), "norm.weight": (5,)}
CUT = {"embedding.weight": 0, "projection.weight": 1, "norm.weight": None}
"""The dimension that tensor parallelism cuts; None: every tp rank holds it."""

Ran: TypeAlias = tuple[Path, list[dict[str, Any]]]
"""The island's folder and what its ranks answered."""


def full(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def tp_box(name: str, tp: int, rank: int) -> Box:
    shape, cut = SHAPES[name], CUT[name]
    if cut is None:
        return Box.whole(shape)
    part = shape[cut] // tp
    return Box(
        shape,
        tuple(rank * part if dimension == cut else 0 for dimension in range(len(shape))),
        tuple(part if dimension == cut else size for dimension, size in enumerate(shape)),
    )


def values_of(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].reshape(-1).clone()


class Layout:
    """This rank's shards at tp 2 × dp 2: weights as dp replicas, anchors split over the ranks that hold them."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1))}
        self.tp, self.dp = self.rank % 2, self.rank // 2
        self.replicas: ProcessGroup = pairs[self.tp, self.tp + 2]
        self.first_two = pairs[0, 1]

    def shards(self, scale: float) -> dict[str, list[Shard]]:
        weights, anchors = [], []
        for name in SHAPES:
            box = tp_box(name, 2, self.tp)
            group = dist.group.WORLD if CUT[name] is None else self.replicas
            weights.append(Shard(name, box, 0, box.numel, scale * values_of(full("weights")[name], box), group))
            holders, me = (4, self.rank) if CUT[name] is None else (2, self.dp)
            start, stop = box.numel * me // holders, box.numel * (me + 1) // holders
            anchor = scale * values_of(full("anchor")[name], box)[start:stop]
            anchors.append(Shard(name, box, start, stop, anchor))
        return {"weights": weights, "anchor": anchors}


def equal(a: dict[str, list[Shard]], b: dict[str, list[Shard]]) -> bool:
    return all(torch.equal(x.values, y.values) for kind in a for x, y in zip(a[kind], b[kind], strict=True))


def message_of(action: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def save(folder: Path, step: int, layout: Layout, **state: object) -> Path:
    return checkpoint.save(
        folder,
        step=step,
        shards=layout.shards(scale=step),
        rank_tensors={"stream": torch.tensor([layout.rank, step])},
        state={"rank": layout.rank} | state,
        about={"layout": {"tp": 2, "dp": 2}},
        group=dist.group.WORLD,
        keep_last=2,
    )


def island(folder: Path) -> dict[str, Any]:
    """One rank's part; returns what the test compares."""
    dist.init_process_group("gloo")
    layout = Layout()
    world, group_of_two = dist.group.WORLD, layout.first_two
    answers: dict[str, Any] = {}
    path = save(folder, 1, layout)

    shards = layout.shards(scale=0)
    state, tensors = checkpoint.load(path, shards=shards, group=world, expected={"layout": {"tp": 2, "dp": 2}})
    answers["same layout"] = equal(shards, layout.shards(scale=1))
    answers["own state"] = (state, tensors["stream"].tolist())

    broken = object() if layout.rank == 2 else None
    answers["one rank fails"] = message_of(lambda: save(folder, 2, layout, broken=broken))
    dist.barrier()
    answers["kept"] = checkpoint.rounds(folder), sorted(file.name for file in folder.iterdir())

    if layout.rank < 2:  # another layout on fewer ranks, of which each is one half of the columns
        box = Box((6, 4), (0, 2 * layout.rank), (6, 2))
        half = Shard("embedding.weight", box, 0, box.numel, torch.zeros(box.numel))
        others = [whole_shard(name, torch.zeros(shape)) for name, shape in list(SHAPES.items())[1:]]
        target = {"anchor": [half, *others]}
        checkpoint.load_tensors(path, shards=target, group=group_of_two)
        answers["columns"] = torch.equal(half.values, values_of(full("anchor")["embedding.weight"], box))
        answers["fewer ranks"] = message_of(
            lambda: checkpoint.load(path, shards={}, group=group_of_two, expected={"layout": {"tp": 2, "dp": 2}})
        )
    if layout.rank == 3:
        alone = {"weights": [whole_shard(name, torch.zeros(shape)) for name, shape in SHAPES.items()]}
        checkpoint.load_tensors(path, shards=alone, group=None)  # while the world goes on with other things
        answers["alone"] = all(torch.equal(s.values, full("weights")[s.name].view(-1)) for s in alone["weights"])
    dist.barrier()

    second = save(folder, 2, layout)
    if layout.rank == 0:
        damaged = second / "__3_0.distcp"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    untouched = layout.shards(scale=5)
    answers["damaged"] = message_of(lambda: checkpoint.load(second, shards=untouched, group=world, expected={}))
    answers["untouched"] = equal(untouched, layout.shards(scale=5))
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("island0")
    return folder, run_ranks(4, island, folder)


def test_the_same_layout_gets_every_bit_and_each_rank_its_own_state(ran: Ran) -> None:
    for rank, answers in enumerate(ran[1]):
        assert answers["same layout"]
        assert answers["own state"] == ({"rank": rank}, [rank, 1])


def test_a_failure_on_one_rank_is_one_error_on_all_and_leaves_nothing(ran: Ran) -> None:
    assert {answers["one rank fails"] for answers in ran[1]} == {ran[1][0]["one rank fails"]}
    assert "not JSON serializable" in ran[1][0]["one rank fails"]
    assert all(answers["kept"] == ([1], ["step-00000001"]) for answers in ran[1])


def test_tensors_load_into_other_layouts_and_the_state_of_ranks_does_not(ran: Ran) -> None:
    assert [answers["columns"] for answers in ran[1][:2]] == [True, True]
    assert all("saved by 4 ranks, this island has 2" in answers["fewer ranks"] for answers in ran[1][:2])
    assert ran[1][3]["alone"]


def test_a_damaged_file_is_named_on_all_ranks_before_anything_is_overwritten(ran: Ran) -> None:
    for answers in ran[1]:
        assert "__3_0.distcp is damaged" in answers["damaged"]
        assert answers["untouched"]


def test_one_rank_loads_what_four_saved_and_each_element_is_stored_once(ran: Ran) -> None:
    path = checkpoint.step_folder(ran[0], 1)
    shards = {kind: [whole_shard(n, torch.zeros(s)) for n, s in SHAPES.items()] for kind in ("weights", "anchor")}
    manifest = checkpoint.load_tensors(path, shards=shards, group=None)
    assert manifest.ranks == 4
    for kind, members in shards.items():
        assert all(torch.equal(shard.values, full(kind)[shard.name].view(-1)) for shard in members)
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, stored in index.items():
        assert isinstance(stored, TensorStorageMetadata)
        assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel(), key
