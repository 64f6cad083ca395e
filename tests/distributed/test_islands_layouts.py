"""Every layout trains the same model: losses, gradients and weights equal those of one rank, to rounding."""

import math

import pytest
import torch

from dilocox.config import Precision, Recompute
from tests.distributed.islands import MODEL, VOCAB, Run, Setting, relative_difference, setting, train_settings

DISTRIBUTED = {"distributed_optimizer": True}
BF16 = {"precision": Precision.bf16}
UNTIED = {"tied_embeddings": False}
SEQUENCE = {"sequence_parallel": True}
VIRTUAL = {"virtual_pp": 2}
FEW = {"micro_batch_size": 4}  # one or two microbatches: four ranks on two cores are slow to talk

LAYOUTS = {
    "tp2": [setting(tp=2), setting(tp=2, **SEQUENCE, **UNTIED), setting(tp=2, **SEQUENCE, recompute=Recompute.full)],
    "pp2": [setting(pp=2), setting(pp=2, **UNTIED), setting(pp=2, **VIRTUAL), setting(pp=2, **VIRTUAL, **UNTIED)],
    "dp2": [setting(dp=2), setting(dp=2, **DISTRIBUTED), setting(dp=2, **BF16), setting(dp=2, **DISTRIBUTED, **BF16)],
    "tp2-pp2": [setting(tp=2, pp=2, **FEW), setting(tp=2, pp=2, **VIRTUAL, **SEQUENCE, **UNTIED, **FEW)],
    "tp2-dp2": [setting(tp=2, dp=2, **FEW), setting(tp=2, dp=2, **DISTRIBUTED, **SEQUENCE, **BF16, **FEW)],
    "pp2-dp2": [
        setting(pp=2, dp=2, **FEW),
        setting(pp=2, dp=2, **DISTRIBUTED),
        setting(pp=2, dp=2, **DISTRIBUTED, **VIRTUAL, **BF16),
    ],
}
SINGLE = [setting(), setting(**UNTIED), setting(**BF16), setting(**BF16, **UNTIED)]


@pytest.fixture(scope="module")
def singles() -> dict[tuple[bool, Precision], Run]:
    """Runs of a single rank, by what is no matter of layout: tied embeddings, precision."""
    return dict(zip(map(_kind, SINGLE), train_settings(*SINGLE), strict=True))


def _kind(one: Setting) -> tuple[bool, Precision]:
    return one.model.tied_embeddings, one.island.precision


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_the_model_of_one_rank(layout: str, singles: dict[tuple[bool, Precision], Run]) -> None:
    for one, run in zip(LAYOUTS[layout], train_settings(*LAYOUTS[layout]), strict=True):
        single = singles[_kind(one)]
        exact = one.island.precision is Precision.fp32
        assert run.initial.keys() == single.initial.keys()
        assert all(torch.equal(run.initial[name], single.initial[name]) for name in single.initial)
        assert run.losses == pytest.approx(single.losses, rel=1e-6 if exact else 1e-3)
        assert run.norms == pytest.approx(single.norms, rel=1e-5 if exact else 1e-2)
        assert relative_difference(run.gradients, single.gradients) < (1e-5 if exact else 2e-2)
        assert relative_difference(run.weights, single.weights) < (1e-5 if exact else 2e-2)
        assert all(
            relative_difference(run.moments[kind], single.moments[kind]) < (1e-4 if exact else 5e-2)
            for kind in single.moments
        )
        assert run.restored_loss == pytest.approx(run.losses[0], rel=1e-6), "the model does not see written weights"
        assert run.restored_loss != pytest.approx(run.losses[-1], rel=1e-4)


def test_a_single_rank_starts_at_chance_and_counts_moments_from_zero(
    singles: dict[tuple[bool, Precision], Run],
) -> None:
    for run in singles.values():
        assert run.losses[0] == pytest.approx(math.log(MODEL.padded_vocab(VOCAB)), abs=0.1)
        assert set(run.moments) == {"exp_avg", "exp_avg_sq"}
        for kind, tensors in run.moments.items():
            assert tensors.keys() == run.weights.keys()
            assert all(not before.any() for before in run.moments_before[kind].values())
            assert all(after.any() for after in tensors.values())


def test_bf16_differs_from_fp32_by_rounding_only(singles: dict[tuple[bool, Precision], Run]) -> None:
    for tied in (True, False):
        rough, exact = singles[tied, Precision.bf16], singles[tied, Precision.fp32]
        assert rough.losses != exact.losses
        assert rough.losses == pytest.approx(exact.losses, rel=1e-3)
        assert all(torch.equal(rough.initial[name], exact.initial[name]) for name in exact.initial)
        rounded = {name: weight.bfloat16().float() for name, weight in rough.weights.items()}
        assert any(not torch.equal(rounded[name], weight) for name, weight in rough.weights.items())
