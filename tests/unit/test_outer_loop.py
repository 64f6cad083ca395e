"""The outer loop's algebra: each method against equations written out again here, in float64 where it matters."""

import pytest
import torch
from torch import Tensor

from dilocox.errors import ConfigError, DriftError, NonFiniteError, SyncError
from dilocox.outer.apply import Overwrite
from dilocox.outer.codecs.protocol import Codes
from dilocox.outer.exchange.all_gather import AllGather
from dilocox.outer.exchange.reduce_scatter import ReduceScatter
from dilocox.outer.job import Progress
from dilocox.outer.merge.mean import Mean, WeightedMean
from dilocox.outer.merge.merged import Merged
from dilocox.outer.optimisers.adam import Adam
from dilocox.outer.optimisers.protocol import OuterOptimizer, Range
from dilocox.outer.optimisers.sgd import SGD, Identity, Momentum, Nesterov
from dilocox.outer.payload import Gradient
from dilocox.outer.schedule import EveryH
from dilocox_kernels.checksum import checksum64
from dilocox_kernels.kernels import select
from dilocox_kernels.spans import Spans
from dilocox_kernels.wire import HEADER_BYTES
from tests.outer_harness import FP32, INT4, INT8, NESTEROV, drift, outer_loop, roles, run_islands, start_weights, step

EXCHANGES = [AllGather(), ReduceScatter()]


def train(islands: int, steps: int, **choices: object) -> list[list[Tensor]]:
    def body(island: int, group: object) -> list[Tensor]:
        weights = start_weights()
        loop = outer_loop(weights, roles(**choices), group)
        for inner_step in range(steps):
            step(loop, weights, island, inner_step, tokens=10 + island)
        loop.check_end()
        return weights

    return run_islands(islands, body)


def reference(
    islands: int, rounds: int, inner_steps: int, lr: float, momentum: float, weights: list[float]
) -> list[Tensor]:
    """DiLoCo with torch's own SGD as outer optimiser, in float64."""
    anchor = [torch.nn.Parameter(tensor.double()) for tensor in start_weights()]
    optimiser = torch.optim.SGD(anchor, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for round_ in range(rounds):
        for parameter in anchor:
            parameter.grad = torch.zeros_like(parameter)
        for island in range(islands):
            local = [parameter.detach().clone() for parameter in anchor]
            for inner_step in range(inner_steps):
                drift(local, island, round_ * inner_steps + inner_step)
            for parameter, moved in zip(anchor, local, strict=True):
                parameter.grad += weights[island] * (parameter.detach() - moved)
        optimiser.step()
    return [parameter.detach() for parameter in anchor]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("islands", [1, 2, 3, 5])
def test_fp32_diloco_equals_its_equations(islands: int, exchange: object) -> None:
    trained = train(islands, 15, schedule=EveryH(inner_steps=3), outer_optimizer=NESTEROV, exchange=exchange)
    expected = reference(islands, 5, 3, 0.7, 0.9, [1 / islands] * islands)
    for weights in trained:
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_weighted_mean_weights_by_tokens_and_by_documents() -> None:
    for by, counts in {"tokens": [10, 11, 12], "documents": [1, 2, 3], "steps": [1, 1, 1]}.items():
        share = [count / sum(counts) for count in counts]
        trained = train(3, 4, merge=WeightedMean(by=by), outer_optimizer=NESTEROV)
        expected = reference(3, 4, 1, 0.7, 0.9, share)
        for got, want in zip(trained[0], expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("codec", [FP32, INT8, INT4])
@pytest.mark.parametrize("islands", [2, 3, 4])
def test_islands_are_bit_identical_after_every_sync(islands: int, codec: object, exchange: object) -> None:
    trained = train(islands, 6, codec=codec, exchange=exchange, outer_optimizer=NESTEROV)
    for weights in trained[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, trained[0], strict=True))


def test_one_island_with_sgd_at_lr_one_is_plain_training_to_one_rounding() -> None:
    trained = train(1, 50)[0]
    plain = start_weights()
    for inner_step in range(50):
        before = [tensor.clone() for tensor in plain]
        drift(plain, 0, inner_step)
        for tensor, old in zip(plain, before, strict=True):
            tensor.copy_(old - (old - tensor))
    assert all(torch.equal(a, b) for a, b in zip(trained, plain, strict=True))


def test_one_island_takes_the_outer_step_too() -> None:
    lookahead = train(1, 4, schedule=EveryH(inner_steps=2), outer_optimizer=SGD(lr=0.5))[0]
    expected = reference(1, 2, 2, 0.5, 0.0, [1.0])
    for got, want in zip(lookahead, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def advance(optimiser: OuterOptimizer, anchor: Tensor, slots: dict[str, Tensor], delta: Tensor, number: int) -> None:
    """One outer step on a merged pseudo-gradient; local weights must become the anchor, and the checksum its own."""
    local = torch.full_like(anchor, torch.nan)
    codes = Codes([delta.view(torch.uint8)], [1.0], Spans.whole(delta.numel()), start=64)
    merged = Merged(codes, Mean(), FP32, select("auto", "cpu"))
    checksum = optimiser.advance(Range(anchor, slots, [local]), merged, Overwrite(), number)
    assert torch.equal(local, anchor)
    assert checksum == checksum64(anchor, 64)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "sgd", "adam"])
def test_outer_optimisers_equal_torchs(kind: str) -> None:
    ours, theirs = {
        "sgd": (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        "momentum": (Momentum(lr=0.3, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        "nesterov": (
            Nesterov(lr=0.3, momentum=0.8),
            lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True),
        ),
        "adam": (
            Adam(lr=0.3, betas=[0.9, 0.95], epsilon=0.1),
            lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.95), eps=0.1),
        ),
    }[kind]
    anchor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(anchor.double())
    reference_optimiser = theirs([parameter])
    slots = {name: torch.zeros(100) for name in ours.slots}
    for number in range(1, 8):
        delta = torch.randn(100, generator=torch.Generator().manual_seed(number))
        parameter.grad = delta.double()
        reference_optimiser.step()
        advance(ours, anchor, slots, delta, number)
        torch.testing.assert_close(anchor.double(), parameter.detach(), rtol=1e-5, atol=1e-5)


def test_nesterov_moves_by_seven_at_a_constant_pseudo_gradient() -> None:
    anchor, slots = torch.zeros(1), {"momentum": torch.zeros(1)}
    for number in range(1, 400):
        before = anchor.clone()
        advance(NESTEROV, anchor, slots, torch.ones(1), number)
    assert (before - anchor).item() == pytest.approx(7.0, rel=1e-4)


def test_gradient_payload_averages_gradients_before_the_inner_step() -> None:
    def body(island: int, group: object) -> list[Tensor]:
        weights = start_weights()
        gradients = [torch.zeros_like(tensor) for tensor in weights]
        from dilocox.shards import whole_shard

        loop = outer_loop(
            weights,
            roles(payload=Gradient(), outer_optimizer=Identity()),
            group,
            gradients=lambda: [whole_shard(f"p{i}", gradient) for i, gradient in enumerate(gradients)],
        )
        for inner_step in range(3):
            for gradient in gradients:
                gradient.zero_()
            drift(gradients, island, inner_step)
            assert len(loop.after_backward(Progress(steps=1))) == 1
            for tensor, gradient in zip(weights, gradients, strict=True):
                tensor.sub_(gradient)
            assert loop.after_update(Progress(steps=1)) == []
        return weights

    trained = run_islands(2, body)
    expected = start_weights()
    for inner_step in range(3):
        both = [[torch.zeros_like(tensor) for tensor in expected] for _ in range(2)]
        for island in range(2):
            drift(both[island], island, inner_step)
        for tensor, first, second in zip(expected, *both, strict=True):
            tensor.sub_((first + second) / 2)
    for weights in trained:
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_payload_and_outer_optimiser_must_fit() -> None:
    with pytest.raises(ConfigError, match="outer_optimizer='SGD'"):
        roles(payload=Gradient())
    with pytest.raises(ConfigError, match="outer_optimizer='none'"):
        roles(outer_optimizer=Identity())


def test_gradients_are_exchanged_in_every_step_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match=r"schedule='EveryH'.*Set schedule=every_h schedule\.inner_steps=1"):
        roles(payload=Gradient(), outer_optimizer=Identity(), schedule=EveryH(2))
    roles(payload=Gradient(), outer_optimizer=Identity(), schedule=EveryH(1))


def test_sent_plus_residual_is_the_pseudo_gradient() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights((96,))
        loop = outer_loop(weights, roles(codec=INT4), group)
        owed = torch.zeros(96)
        for inner_step in range(5):
            anchor = loop.tensors()["anchor"][0].values.clone()
            drift(weights, 0, inner_step)
            delta = anchor - weights[0]
            loop.after_update(Progress())
            sent = anchor - loop.tensors()["anchor"][0].values  # lr 1, one island
            residual = loop.tensors()["residual_0"][0].values
            torch.testing.assert_close(sent + residual, delta + owed, rtol=0, atol=1e-6)
            owed = residual.clone()

    run_islands(1, body)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_norm_reported_is_that_of_the_pseudo_gradient_alone(exchange: object) -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights()
        loop = outer_loop(weights, roles(codec=INT4, exchange=exchange), group)
        for inner_step in range(3):
            anchor = [tensor.clone() for tensor in weights]
            drift(weights, island, inner_step)
            delta = torch.cat([before - now for before, now in zip(anchor, weights, strict=True)])
            (report,) = loop.after_update(Progress())
            assert report.pseudo_gradient_norm == pytest.approx(delta.double().norm().item(), rel=1e-6)
            assert report.pseudo_gradient_max == pytest.approx(delta.abs().max().item(), rel=1e-6)
        assert any(bool(shard.values.any()) for shard in loop.tensors()["residual_0"])

    run_islands(2, body)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_nan_stops_all_islands_before_it_spreads(exchange: object) -> None:
    anchors: dict[int, Tensor] = {}

    def body(island: int, group: object) -> None:
        weights = start_weights()
        loop = outer_loop(weights, roles(codec=INT4, exchange=exchange), group)
        step(loop, weights, island, 0)
        anchors[island] = loop.tensors()["anchor"][0].values.clone()
        if island == 1:
            weights[1][3] = float("nan")
        named = "fragment all: the pseudo-gradient has a NaN.* first in p1" if island == 1 else "fragment all: island 1"
        with pytest.raises(NonFiniteError, match=f"inner step 2, {named}"):
            loop.after_update(Progress())
        assert torch.equal(loop.tensors()["anchor"][0].values, anchors[island])
        assert loop.state()["syncs"] == 1

    run_islands(3, body)
    assert torch.equal(anchors[0], anchors[1])


def test_what_overflows_though_all_parameters_are_finite_is_said_to_do_so() -> None:
    def body(island: int, group: object) -> None:
        weights = [torch.full((40,), 3e38)]
        loop = outer_loop(weights, roles(), group)
        weights[0].neg_()  # Δ = 6e38 is no fp32 number
        with pytest.raises(NonFiniteError, match=r"inner step 1, fragment all.*though all parameters are finite"):
            loop.after_update(Progress())

    run_islands(1, body)


def test_islands_that_came_apart_are_caught_by_the_next_sync() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights()
        loop = outer_loop(weights, roles(), group)
        step(loop, weights, island, 0)
        if island == 1:
            loop.tensors()["anchor"][0].values[0] += 1e-6
            loop.load_state(loop.state())
        with pytest.raises(DriftError, match=r"fragment all.*checksum"):
            loop.after_update(Progress())

    run_islands(2, body)


def test_islands_that_came_apart_in_the_last_sync_are_caught_at_the_end() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights()
        loop = outer_loop(weights, roles(), group)
        step(loop, weights, island, 0)
        if island == 0:
            loop.tensors()["anchor"][0].values[0] += 1e-6
            loop.load_state(loop.state())
        with pytest.raises(DriftError, match="after sync 1"):
            loop.check_end()

    run_islands(2, body)


def test_different_settings_never_mix() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights()
        loop = outer_loop(weights, roles(codec=INT4 if island else INT8), group)
        loop._engine._fingerprint += island
        with pytest.raises(SyncError, match="outer step was not taken"):
            loop.after_update(Progress())
        assert all(torch.equal(a, b) for a, b in zip(weights, start_weights(), strict=True))

    run_islands(2, body)


@pytest.mark.parametrize("islands", [2, 3, 4, 8])
def test_bytes_follow_the_formulas(islands: int) -> None:
    for exchange in EXCHANGES:

        def body(island: int, group: object, exchange: object = exchange) -> int:
            weights = [torch.zeros(64 * 1024)]
            loop = outer_loop(weights, roles(codec=INT4, exchange=exchange), group)
            return step(loop, weights, island, 0)[0].bytes_sent

        sent = run_islands(islands, body)
        formula = exchange.bytes_sent(INT4.encoded_bytes(64 * 1024), islands)
        framing = 2 * islands * (HEADER_BYTES + 16)  # headers of two hops, votes
        assert all(formula <= each <= formula + framing for each in sent), (sent, formula)


def test_the_anchor_can_be_put_in_place_between_syncs() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights()
        published: list[int] = []
        loop = outer_loop(weights, roles(schedule=EveryH(inner_steps=2)), group, publish=lambda: published.append(1))
        step(loop, weights, island, 0)
        local = [tensor.clone() for tensor in weights]
        with loop.anchor_weights():
            assert all(torch.equal(a, b) for a, b in zip(weights, start_weights(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(weights, local, strict=True))
        assert len(published) == 2

    run_islands(2, body)


def test_resumed_state_continues_bit_for_bit() -> None:
    def body(island: int, group: object) -> None:
        chosen = roles(codec=INT4, outer_optimizer=NESTEROV, exchange=ReduceScatter())
        weights = start_weights()
        loop = outer_loop(weights, chosen, group)
        for inner_step in range(3):
            step(loop, weights, island, inner_step)
        saved = {kind: [s.values.clone() for s in shards] for kind, shards in loop.tensors().items()}
        state, local = loop.state(), [tensor.clone() for tensor in weights]
        for inner_step in range(3, 6):
            step(loop, weights, island, inner_step)

        again = [torch.zeros_like(tensor) for tensor in weights]
        resumed = outer_loop(again, chosen, group)
        for kind, shards in resumed.tensors().items():
            for shard, values in zip(shards, saved[kind], strict=True):
                shard.values.copy_(values)
        for tensor, values in zip(again, local, strict=True):
            tensor.copy_(values)
        resumed.load_state(state)
        for inner_step in range(3, 6):
            step(resumed, again, island, inner_step)
        assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        assert resumed.checksums == loop.checksums

    run_islands(3, body)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_torchs_default_dtype_changes_nothing(exchange: object) -> None:
    def body(island: int, group: object) -> Tensor:
        weights = torch.linspace(0, 1, 70, dtype=torch.float32)
        loop = outer_loop([weights], roles(codec=INT4, exchange=exchange, outer_optimizer=NESTEROV), group)
        for _ in range(3):
            weights.mul_(1.01 + island)
            loop.after_update()
        return weights

    expected = run_islands(2, body)
    torch.set_default_dtype(torch.bfloat16)
    try:
        trained = run_islands(2, body)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


def test_checksums_are_of_the_anchor() -> None:
    def body(island: int, group: object) -> None:
        weights = start_weights((64,))
        loop = outer_loop(weights, roles(), group)
        step(loop, weights, island, 0)
        assert loop.checksums == {"all": checksum64(loop.tensors()["anchor"][0].values)}

    run_islands(2, body)
