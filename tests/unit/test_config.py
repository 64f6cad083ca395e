"""The configuration: what is refused, naming field, value and remedy; and what it is read back as."""

from pathlib import Path

import pytest

from dilocox.config import Config, Precision, load_config, read_config, to_yaml
from dilocox.errors import ConfigError


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return caught.value


def test_the_defaults_are_accepted() -> None:
    config = load_config([])
    assert config.island.layout.world_size == 2
    assert config.run_dir == Path("runs") / f"{config.algo_name}-tiny-2x"


@pytest.mark.parametrize(
    ("override", "field", "suggestion"),
    [
        ("model.layerz=4", "model.layerz", "Did you mean model.layers?"),
        ("schedule.inner_step=3", "schedule.inner_step", "Did you mean schedule.inner_steps?"),
        ("layers=3", "layers", "Did you mean model.layers?"),
        ("lr=3", "lr", "Did you mean inner.lr or outer_optimizer.lr?"),
        ("codecs=int4", "codecs", "Did you mean codec?"),
        ("+model.layer=3", "model.layer", "Did you mean model.layers?"),
        ("experimen=7b", "experimen", "Did you mean experiment?"),
        ("qqqqqqqq=1", "qqqqqqqq", "See conf/"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(override: str, field: str, suggestion: str) -> None:
    error = refusal(override)
    assert error.field == field
    assert "unknown key" in str(error)
    assert suggestion in str(error)


@pytest.mark.parametrize(
    ("override", "field", "parts"),
    [
        ("codec=int5", "codec", ["'int5'", "no such choice", "bf16, bins2, e2m1, e3m0, fp32, int4, int8"]),
        ("model=gpt9", "model", ["'gpt9'", "no such choice", "tiny"]),
        ("island.tp=two", "island.tp", ["'two'", "Integer"]),
        ("evaluation.batches=1.5", "evaluation.batches", ["1.5", "Integer"]),
        ("island.tp=null", "island.tp", ["None", "int"]),
        ("inner.decay=cos", "inner.decay", ["'cos'", "constant, linear, cosine"]),
        ("island.precision=fp16", "island.precision", ["'fp16'", "auto, fp32, bf16"]),
        ("steps", "steps", ["key=value"]),
        ("+codec.blok=3", "codec", ["blok", "See conf/codec/"]),
        ("schedule.inner_steps=2.5", "schedule.inner_steps", ["2.5", "an integer", "See conf/schedule/"]),
        ("schedule.inner_steps=many", "schedule.inner_steps", ["'many'", "an integer"]),
        ("participation.attempts=true", "participation.attempts", ["True", "an integer"]),
        ("outer_optimizer.lr=nan", "outer_optimizer.lr", ["nan", "a finite number"]),
        ("outer_optimizer.momentum=null", "outer_optimizer.momentum", ["None", "a finite number"]),
        ("codec.error_feedback=1", "codec.error_feedback", ["1", "true or false"]),
        ("codec.scale_dtype=16", "codec.scale_dtype", ["16", "a word"]),
        ("schedule._target_=dilocox.outer.schedule.EveryG", "schedule._target_", ["EveryG", "not found"]),
        ("name=${nothing}", "name", ["nothing"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(override: str, field: str, parts: list[str]) -> None:
    error = refusal(override)
    assert error.field == field
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize(
    ("overrides", "field", "parts"),
    [
        (["name=a/b"], "name", ["'a/b'", "without slashes", "runs_dir"]),
        (["name=.."], "name", ["'..'"]),
        (["name="], "name", ["''"]),
        (["name=latest"], "name", ["'latest'"]),
        (["islands=0"], "islands", ["0", "at least 1"]),
        (["steps=-1"], "steps", ["-1"]),
        (["checkpoint.keep_last=1"], "checkpoint.keep_last", ["at least two"]),
        (["checkpoint.every_steps=-1"], "checkpoint.every_steps", ["negative"]),
        (["data.heldout_fraction=1"], "data.heldout_fraction", ["between 0 and 1"]),
        (["model.heads=3"], "model.heads", ["3", "hidden_size=128"]),
        (["model.heads=128", "model.kv_heads=2"], "model.heads", ["odd head size"]),
        (["model.kv_heads=3"], "model.kv_heads", ["heads=4"]),
        (["model.sequence_length=129"], "model.sequence_length", ["129", "max_position=128"]),
        (["model.norm_epsilon=0"], "model.norm_epsilon", ["positive"]),
        (["model.init_std=nan"], "model.init_std", ["nan", "positive"]),
        (["island.tp=3", "model.kv_heads=1"], "island.tp", ["3", "model.heads=4"]),
        (["island.tp=4"], "island.tp", ["model.kv_heads=2"]),
        (["model.ffn_hidden_size=351"], "island.tp", ["model.ffn_hidden_size=351"]),
        (["model.vocab_multiple=1"], "island.tp", ["model.vocab_multiple=1"]),
        (["island.pp=3"], "island.pp", ["model.layers=4"]),
        (["island.virtual_pp=2"], "island.virtual_pp", ["pp of at least 2", "Set it to 1"]),
        (["island.pp=2", "island.virtual_pp=4"], "island.pp", ["pp × virtual_pp = 8"]),
        (["island.pp=2", "island.virtual_pp=2"], "island.batch_size", ["1 microbatches", "multiple of pp=2"]),
        (
            ["island.pp=2", "island.virtual_pp=2", "island.micro_batch_size=4", "evaluation.batches=3"],
            "evaluation.batches",
            ["3", "multiple of pp=2"],
        ),
        (["island.batch_size=20"], "island.batch_size", ["20", "micro_batch_size × dp = 16"]),
        (["island.dp=3"], "island.batch_size", ["micro_batch_size × dp = 48"]),
        (["island=single", "island.sequence_parallel=true"], "island.sequence_parallel", ["tp of at least 2"]),
        (
            ["island.sequence_parallel=true", "model.sequence_length=127"],
            "island.sequence_parallel",
            ["tp=2", "model.sequence_length=127"],
        ),
        (["inner=sgd", "island.distributed_optimizer=true"], "island.distributed_optimizer", ["AdamW only", "sgd"]),
        (["inner.lr=0"], "inner.lr", ["positive"]),
        (["inner.lr=nan"], "inner.lr", ["nan", "positive"]),
        (["inner.betas=[0.9]"], "inner.betas", ["[0.9]", "two numbers"]),
        (["inner.betas=[0.9,1.0]"], "inner.betas", ["[0, 1)"]),
        (["inner.min_lr_ratio=2"], "inner.min_lr_ratio", ["from 0 to 1"]),
        (["inner.warmup_steps=-1"], "inner.warmup_steps", ["0 or more"]),
        (["inner.decay_steps=0"], "inner.decay_steps", ["1 or more"]),
        (["inner.weight_decay=-0.1"], "inner.weight_decay", ["0 or more"]),
        (["inner.clip_grad=inf"], "inner.clip_grad", ["inf", "0 means no clipping"]),
        (["data.virtual_shards=3"], "data.virtual_shards", ["too few for 2 islands"]),
        (["schedule.inner_steps=0"], "schedule.inner_steps", ["1 or more"]),
        (["codec.block_size=48"], "codec.block_size", ["48", "power of two"]),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], field: str, parts: list[str]) -> None:
    error = refusal(*overrides)
    assert error.field == field
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        ["island.pp=2", "island.virtual_pp=2", "island.micro_batch_size=4"],
        ["island.sequence_parallel=true", "island.recompute=full"],
        ["island=dp2", "island.distributed_optimizer=true", "island.precision=bf16"],
        ["model.kv_heads=4", "island.tp=4"],
        ["inner=sgd", "inner.betas=[0.9,0.0]"],
    ],
)
def test_what_works_is_accepted(overrides: list[str]) -> None:
    load_config(overrides)


def test_microbatches_of_a_rank() -> None:
    assert load_config(["island.dp=2", "island.batch_size=24", "island.micro_batch_size=4"]).island.microbatches == 3


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 128), (128, 128), (129, 256), (257, 384)])
def test_the_vocabulary_is_padded_whatever_tp_is(vocab_size: int, padded: int) -> None:
    for layout in ("single", "tp2"):
        assert load_config([f"island={layout}"]).model.padded_vocab(vocab_size) == padded


def test_a_written_configuration_is_read_back(tmp_path: Path) -> None:
    config = load_config(["island.precision=bf16", "algo=fedavg", "model=125m"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    read = read_config(path)
    assert isinstance(read, Config)
    assert read == config
    assert read.island.precision is Precision.bf16


def test_a_written_configuration_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config([])).replace("  layers: 4", "  layers: 4\n  layerz: 5"))
    with pytest.raises(ConfigError, match=r"model\.layerz=5: unknown key\. Did you mean model\.layers\?"):
        read_config(path)
