"""What the training loop tells comes out in the metrics file, and the numbers derived from it are right."""

import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilocox.observe import environment, flops
from dilocox.observe.reader import read
from dilocox.observe.recorder import Recorder
from dilocox.observe.schema import METRICS_FILE, Checkpoint, End, Evaluation, Resume, Start, Step, Sync
from dilocox.parameters import total_parameters
from tests import observe_harness as made_up


def test_every_kind_is_recorded_in_order_and_for_its_island(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=50")
    with Recorder(config, 1, leader=True) as recorder:
        made_up.start(recorder)
        recorder.resume(step=49, path="checkpoints/49")
        made_up.take_steps(recorder, 1, 50, 50)
        recorder.evaluation(step=50, round=1, loss=2.0)
        made_up.end(recorder, 50)
    records = read(config.run_dir / METRICS_FILE)
    assert [type(record) for record in records] == [Start, Resume, Step, Sync, Checkpoint, Evaluation, End]
    assert {record.island for record in records} == {1}
    assert [record.time for record in records] == sorted(record.time for record in records)


def test_derived_numbers(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=50", "island.batch_size=16", "model.sequence_length=128")
    with Recorder(config, 0, leader=True) as recorder:
        made_up.start(recorder)
        made_up.take_steps(recorder, 0, 50, 50)
        recorder.evaluation(step=50, round=1, loss=math.log(8))
    start, step, sync, _, evaluation = read(config.run_dir / METRICS_FILE)
    assert isinstance(start, Start)
    assert (start.tp, start.pp, start.dp) == (2, 1, 1)
    assert start.tokens_per_step == 16 * 128
    assert start.parameters == total_parameters(config.model, made_up.PADDED_VOCAB)
    assert isinstance(step, Step)
    assert step.tokens_per_s == pytest.approx(16 * 128 / 0.125)
    assert step.mfu is None
    assert isinstance(sync, Sync)
    assert sync.bits_per_parameter == pytest.approx(8 * 430 / 800)
    assert sync.checksum == f"{50:016x}"
    assert isinstance(evaluation, Evaluation)
    assert evaluation.perplexity == pytest.approx(8)


def test_only_the_leader_writes(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=50")
    with Recorder(config, 0, leader=False) as recorder:
        made_up.start(recorder)
        recorder.resume(step=0, path=None)
        made_up.take_steps(recorder, 0, 1, 50)
        made_up.end(recorder, 50)
    assert list(tmp_path.iterdir()) == []


def test_every_nth_step_and_the_last_are_recorded_with_the_mean_pace(tmp_path: Path) -> None:
    config = made_up.config(tmp_path, "steps=50", "observe.log_every_steps=20")
    with Recorder(config, 0, leader=True) as recorder:
        made_up.start(recorder)
        for step in range(1, 51):
            recorder.step(step=step, loss=1.0, lr=0.1, grad_norm=1.0, tokens=step, seconds=step / 100)
    steps = [record for record in read(config.run_dir / METRICS_FILE) if isinstance(record, Step)]
    assert [step.step for step in steps] == [20, 40, 50]
    assert [step.step_s for step in steps] == pytest.approx([0.105, 0.305, 0.455])
    tokens_per_step = config.island.batch_size * config.model.sequence_length
    assert [step.tokens_per_s for step in steps] == pytest.approx([tokens_per_step / step.step_s for step in steps])


def test_a_loss_too_large_for_its_perplexity_does_not_stop_training(tmp_path: Path) -> None:
    config = made_up.config(tmp_path)
    with Recorder(config, 0, leader=True) as recorder:
        recorder.evaluation(step=0, round=0, loss=1e4)
    [evaluation] = read(config.run_dir / METRICS_FILE)
    assert isinstance(evaluation, Evaluation)
    assert evaluation.loss == 1e4
    assert math.isnan(evaluation.perplexity)


def test_attention_scores_count_each_pair_of_a_token_and_a_key_before_it(tmp_path: Path) -> None:
    model = made_up.config(tmp_path, "model.sequence_length=16", "model.layers=3").model
    pairs = sum(position + 1 for position in range(model.sequence_length))
    products = 2 * 2 * model.hidden_size * pairs * model.layers / model.sequence_length  # QKᵀ, PV; 2 FLOP each
    matrices = 2 * flops.matmul_parameters(model, made_up.PADDED_VOCAB)
    assert flops.flops_per_token(model, made_up.PADDED_VOCAB) == 3 * (matrices + products)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Some GPU of 2042", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(name: str, peak: float | None) -> None:
    assert flops.peak_flops(name) == peak


def test_mfu_is_the_part_of_all_ranks_peak() -> None:
    assert flops.mfu(1000.0, 6e9, 1e12, ranks=12) == pytest.approx(0.5)
    assert flops.mfu(1000.0, 6e9, None, ranks=12) is None


def test_versions_are_those_that_run() -> None:
    versions = environment.versions()
    assert versions["torch"] == torch.__version__
    assert versions["python"] == platform.python_version()
    assert set(versions) == {"python", "dilocox", "torch", "megatron-core"}


def test_the_commit_is_that_of_the_checkout() -> None:
    checkout = Path(environment.__file__).parents[2]
    commit = environment.git_commit()
    if not (checkout / ".git").exists():
        assert commit is None
        return
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert commit is not None
    assert commit.removesuffix("-dirty") == head.stdout.strip()


def test_peak_memory_grows_with_what_is_held() -> None:
    before = environment.peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + (16 << 20))  # 4 B each: more than all that was held before
    assert environment.peak_memory_bytes(torch.device("cpu")) >= before + (16 << 20)
    assert held.numel()


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    held = torch.ones(environment.peak_memory_bytes(torch.device("cpu")) // 4)
    code = "import torch; from dilocox.observe.environment import peak_memory_bytes as p; print(p(torch.device('cpu')))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(child.stdout) < environment.peak_memory_bytes(torch.device("cpu")) - 2 * held.numel()
