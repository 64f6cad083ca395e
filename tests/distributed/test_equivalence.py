"""What methods reduce to: plain training on one island, and the published equations on two."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.plain import PlainGPT
from dilocox import checkpoint
from dilocox.config import Config, load_config
from dilocox.data.corpus import Corpus, open_corpus
from dilocox.islands.initialise import initialise
from dilocox.islands.megatron import MegatronIsland
from dilocox.islands.world import start_world, stop_world
from dilocox.outer.island_group import IslandGroup
from dilocox.parameter_hash import parameter_hash
from dilocox.resume import island_folder
from dilocox.shards import Box, Shard
from tests.distributed.ranks import run_ranks
from tests.runs import TINY, Outcome, corpus, train_in_one_process

STEPS = 50


def settings(tmp_path: Path, name: str, *overrides: str) -> list[str]:
    return ["island=single", *TINY, f"runs_dir={tmp_path}", f"name={name}", f"steps={STEPS}", *overrides]


def corpus_of(config: Config, island: int) -> Corpus:
    return open_corpus(
        config.data,
        islands=config.islands,
        island=island,
        dp=1,
        dp_rank=0,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        micro_batch_size=config.island.micro_batch_size,
        batch_size=config.island.batch_size,
    )


def _plain_megatron_rank(overrides: list[str]) -> tuple[dict[int, float], str]:
    """An island's inner steps and nothing around them: losses by step, and the hash of the weights."""
    config = load_config(overrides)
    world = start_world(config.island.layout, config.device)
    data = corpus_of(config, 0)
    island = MegatronIsland(
        model=config.model,
        island=config.island,
        inner=config.inner,
        vocab_size=data.tokenizer.vocab_size,
        seed=config.seed,
        world=world,
    )
    losses = {}
    for step in range(1, config.steps + 1):
        losses[step] = island.forward_backward([data.train.next_microbatch()])
        island.update()
    digits = parameter_hash(island.weights(), IslandGroup(None, world.device))
    stop_world()
    return losses, digits


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[dict[int, float], str], Outcome, Outcome]:
    """Fifty steps of one island: without an outer loop, with gradients as payload, with an outer step of length one."""
    tmp_path = tmp_path_factory.mktemp("one-island")
    common = [*corpus(tmp_path / "corpus"), "islands=1", "codec=fp32"]
    plain = settings(tmp_path, "plain", *common)
    gradients = settings(tmp_path, "gradients", *common, "algo=sync_dp")
    every_step = settings(tmp_path, "every-step", *common, "algo=local_sgd", "schedule.inner_steps=1")
    [megatron] = run_ranks(1, _plain_megatron_rank, plain)
    by_gradients, by_displacement = train_in_one_process([gradients, every_step])
    return megatron, by_gradients, by_displacement


def test_one_island_that_exchanges_gradients_is_plain_training_bit_for_bit(runs: tuple) -> None:
    (losses, digits), by_gradients, _ = runs
    assert by_gradients.losses(0) == losses
    assert by_gradients.hashes == [digits]


def test_one_island_with_an_outer_step_of_length_one_is_plain_training_to_rounding(runs: tuple) -> None:
    (losses, digits), _, by_displacement = runs
    for step, loss in by_displacement.losses(0).items():
        assert loss == pytest.approx(losses[step], rel=2e-5), step
    assert by_displacement.hashes != [digits], "θ − (θ − θ_k) rounds once; were it exact, this test would test nothing"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fp32_diloco_equals_an_independent_reference(tmp_path: Path, optimizer: str) -> None:
    """Five rounds of ten steps on two islands of a GPT, against plain torch with torch's own optimisers."""
    overrides = settings(
        tmp_path,
        "diloco",
        *corpus(tmp_path / "corpus"),
        "codec=fp32",
        f"inner={optimizer}",
        "inner.lr=1e-3" if optimizer == "adamw" else "inner.lr=0.05",
        "inner.epsilon=1e-3",  # keeps gradients near zero from turning roundings into whole steps
        "inner.decay=constant",
        "inner.warmup_steps=0",
        "inner.weight_decay=0",
        "inner.clip_grad=0",
        "schedule.inner_steps=10",
    )
    [run] = train_in_one_process([overrides])
    config = load_config(overrides)
    expected, losses = reference(config)
    path = checkpoint.step_folder(island_folder(config.run_dir, 0), STEPS)
    trained = stored_weights(path)
    assert trained.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(trained[name].view_as(parameter), parameter.detach(), rtol=0, atol=1e-6)
    for island in range(2):
        for step, loss in run.losses(island).items():
            assert loss == pytest.approx(losses[island][step - 1], abs=1e-5), (island, step)


def reference(config: Config) -> tuple[PlainGPT, list[list[float]]]:
    """DiLoCo, arXiv 2311.08105, algorithm 1, written out: the final anchor, and each island's losses."""
    corpora = [corpus_of(config, island) for island in range(config.islands)]
    anchor, *islands = (started(config, corpora[0].tokenizer.vocab_size) for _ in range(1 + config.islands))
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inner = [inner_optimizer(config, island.parameters()) for island in islands]
    losses: list[list[float]] = [[] for _ in islands]
    for step in range(1, config.steps + 1):
        for data, model, optimizer, curve in zip(corpora, islands, inner, losses, strict=True):
            optimizer.zero_grad()
            loss = model(data.train.next_microbatch())
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        if step % config.schedule["inner_steps"]:
            continue
        for shared, *local in zip(anchor.parameters(), *(model.parameters() for model in islands), strict=True):
            shared.grad = torch.stack([shared.detach() - parameter.detach() for parameter in local]).mean(dim=0)
        outer.step()
        for model in islands:
            model.load_state_dict(anchor.state_dict())
    return anchor, losses


def inner_optimizer(config: Config, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    inner = config.inner
    if inner.optimizer.value == "sgd":
        return torch.optim.SGD(parameters, lr=inner.lr)
    return torch.optim.AdamW(parameters, lr=inner.lr, betas=inner.betas, eps=inner.epsilon, weight_decay=0)


def started(config: Config, vocab_size: int) -> PlainGPT:
    """A plain model with the start weights that the configuration's seed means."""
    model = PlainGPT(config.model, vocab_size)
    shards = []
    for name, parameter in model.named_parameters():
        shape = (2, config.model.ffn_hidden_size, config.model.hidden_size) if "linear_fc1" in name else parameter.shape
        values = parameter.detach().view(-1)
        shards.append(Shard(name, Box.whole(shape), 0, values.numel(), values))
    initialise(shards, config.model, config.seed)
    return model


def stored_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, whole, by name."""
    prefix = "weights/"
    entries = checkpoint.read_manifest(path).tensors
    shapes = {key.removeprefix(prefix): entry["shape"] for key, entry in entries.items() if key.startswith(prefix)}
    weights = {name: torch.empty(prod(shape)) for name, shape in shapes.items()}
    shards = [Shard(name, Box.whole(shapes[name]), 0, flat.numel(), flat) for name, flat in weights.items()]
    checkpoint.load_tensors(path, shards={"weights": shards}, group=None)
    return weights
