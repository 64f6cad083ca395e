"""An island against the same model and the same update written in plain torch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.plain import PlainGPT
from dilocox.config import Device, InnerConfig, InnerOptimizer, Precision
from dilocox.islands.inner_schedule import InnerSchedule
from tests.distributed.islands import STEPS, VOCAB, Run, Setting, relative_difference, setting, train_settings
from tests.distributed.ranks import run_ranks

SGD = {"optimizer": InnerOptimizer.sgd, "lr": 0.1}
SETTINGS = {
    "AdamW, clipped": setting(clip_grad=0.3),
    "AdamW, untied, not clipped": setting(clip_grad=0.0, tied_embeddings=False),
    "SGD": setting(**SGD, betas=(0.0, 0.0), weight_decay=0.0, clip_grad=0.0),
    "SGD, momentum, decay, clipped": setting(**SGD, betas=(0.9, 0.0), weight_decay=0.01, clip_grad=0.5),
    "one kv head, distributed optimizer": setting(kv_heads=1, distributed_optimizer=True),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return dict(zip(SETTINGS, train_settings(*SETTINGS.values()), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_plain_model_and_update_give_the_same_run(name: str, runs: dict[str, Run]) -> None:
    one, run = SETTINGS[name], runs[name]
    plain = PlainGPT(one.model, VOCAB)
    assert {key: weight.numel() for key, weight in plain.named_parameters()} == {
        key: weight.numel() for key, weight in run.initial.items()
    }
    plain.load(run.initial)
    losses, norms = [], []
    update = _update(plain, one.inner)
    for step in range(STEPS):
        losses.append(_accumulate(plain, one, step))
        if step == 0:
            assert relative_difference(_named(plain, run, gradients=True), run.gradients) < 1e-5
        norms.append(next(update))
    assert run.losses == pytest.approx(losses, rel=1e-6)
    assert run.norms == pytest.approx(norms, rel=1e-5)
    assert run.rates == [InnerSchedule.of(one.inner).at(step) for step in range(1, STEPS + 1)]
    assert relative_difference(_named(plain, run), run.weights) < 1e-5


def _accumulate(plain: PlainGPT, one: Setting, step: int) -> float:
    plain.zero_grad()
    batches = one.batches(0, step)
    losses: list[Tensor] = [plain(batch) / len(batches) for batch in batches]
    sum(losses, torch.zeros(())).backward()
    return sum(loss.item() for loss in losses)


def _named(plain: PlainGPT, run: Run, *, gradients: bool = False) -> dict[str, Tensor]:
    """Weights or gradients in the shapes that the island gives them."""
    chosen = {name: weight.grad if gradients else weight.detach() for name, weight in plain.named_parameters()}
    return {name: tensor.reshape(run.initial[name].shape) for name, tensor in chosen.items() if tensor is not None}


def _update(plain: PlainGPT, inner: InnerConfig) -> Iterator[float]:
    """Takes a step at each `next`, which yields the norm of the gradient before clipping."""
    schedule = InnerSchedule.of(inner)
    weights = dict(plain.named_parameters())
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    beta1, beta2 = inner.betas
    step = 0
    while True:
        step += 1
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        norm = float(sum(gradient.double().square().sum() for gradient in gradients.values())) ** 0.5
        scale = min(1.0, inner.clip_grad / norm) if inner.clip_grad else 1.0
        lr = schedule.at(step)
        for name, weight in weights.items():
            gradient = gradients[name] * scale
            decay = 0.0 if "norm" in name else inner.weight_decay
            with torch.no_grad():
                if inner.optimizer is InnerOptimizer.sgd:
                    first[name] = beta1 * first[name] + gradient + decay * weight
                    weight.sub_(lr * first[name])
                else:
                    first[name] = beta1 * first[name] + (1 - beta1) * gradient
                    second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
                    root = (second[name] / (1 - beta2**step)).sqrt() + inner.epsilon
                    weight.sub_(lr * (decay * weight + first[name] / (1 - beta1**step) / root))
        yield norm


def test_bf16_trains() -> None:
    run_ranks(1, _overfit)


def _overfit() -> None:
    """The loss of one batch falls far, with each optimizer; main weights stay fp32 and the model is bf16."""
    from dilocox.islands.world import start_world

    bf16 = {"precision": Precision.bf16, "lr": 3e-3, "decay_steps": 100}
    world = start_world(setting().island.layout, Device.auto)
    for one in (
        setting(**bf16),
        setting(**bf16, distributed_optimizer=True),
        setting(**bf16 | SGD, betas=(0.9, 0.0), weight_decay=0.0),
    ):
        island = one.build(world)
        losses = []
        for _ in range(25):
            losses.append(island.forward_backward(one.batches(0, 0)))
            island.update()
        assert losses[-1] < losses[0] - 0.3, (one.inner.optimizer, losses)
        assert all(shard.values.dtype is torch.float32 for shard in island.weights())
        assert {weight.dtype for chunk in island._chunks for weight in chunk.parameters()} == {torch.bfloat16}
