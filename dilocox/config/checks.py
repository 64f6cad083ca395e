"""Combinations of settings that cannot work, refused before anything starts."""

import math

from dilocox.config.schema import Config, InnerOptimizer, ModelConfig
from dilocox.errors import ConfigError


def check(config: Config) -> None:
    """Raise ConfigError, naming the field, its value and the remedy, where settings cannot work."""
    _check_name(config)
    _check_positive(config)
    _check_model(config.model)
    _check_layout(config)
    _check_pipeline(config)
    _check_inner(config)
    _check_schedule(config)


def _check_name(config: Config) -> None:
    if config.name in ("", ".", "..", "latest") or "/" in config.name:
        raise ConfigError(
            "name",
            config.name,
            "cannot be the name of a run's folder",
            "Choose a word without slashes, other than 'latest'; runs_dir says where the folder lies",
        )


def _check_positive(config: Config) -> None:
    model, island = config.model, config.island
    positive = {
        "islands": config.islands,
        "steps": config.steps,
        "threads_per_rank": config.threads_per_rank,
        "evaluation.every_steps": config.evaluation.every_steps,
        "evaluation.batches": config.evaluation.batches,
        "observe.log_every_steps": config.observe.log_every_steps,
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.sequence_length": model.sequence_length,
        "model.vocab_multiple": model.vocab_multiple,
        "island.tp": island.tp,
        "island.pp": island.pp,
        "island.virtual_pp": island.virtual_pp,
        "island.dp": island.dp,
        "island.batch_size": island.batch_size,
        "island.micro_batch_size": island.micro_batch_size,
        "data.virtual_shards": config.data.virtual_shards,
    }
    for field, value in positive.items():
        if value < 1:
            raise ConfigError(field, value, "must be at least 1", f"Set {field} to 1 or more")
    if config.checkpoint.every_steps < 0:
        raise ConfigError("checkpoint.every_steps", config.checkpoint.every_steps, "is negative", "0 means never")
    if config.checkpoint.keep_last < 2:
        raise ConfigError(
            "checkpoint.keep_last",
            config.checkpoint.keep_last,
            "islands may stop one round apart, so each must keep at least two checkpoints",
            "Set it to 2 or more",
        )
    if not 0 < config.data.heldout_fraction < 1:
        raise ConfigError("data.heldout_fraction", config.data.heldout_fraction, "not between 0 and 1", "Try 0.02")


def _check_inner(config: Config) -> None:
    inner = config.inner
    if len(inner.betas) != 2 or not all(0 <= beta < 1 for beta in inner.betas):
        raise ConfigError("inner.betas", list(inner.betas), "expected two numbers, each in [0, 1)", "Try [0.9, 0.95]")
    for field, value, fits, expected, remedy in (
        ("lr", inner.lr, inner.lr > 0, "positive", "Try 1e-3"),
        ("min_lr_ratio", inner.min_lr_ratio, 0 <= inner.min_lr_ratio <= 1, "from 0 to 1", "Try 0.1"),
        ("warmup_steps", inner.warmup_steps, inner.warmup_steps >= 0, "0 or more", "0 means no warm-up"),
        ("decay_steps", inner.decay_steps, inner.decay_steps >= 1, "1 or more", "It is usually ${steps}"),
        ("epsilon", inner.epsilon, inner.epsilon > 0, "positive", "Try 1e-8"),
        ("weight_decay", inner.weight_decay, inner.weight_decay >= 0, "0 or more", "0 means no decay"),
        ("clip_grad", inner.clip_grad, inner.clip_grad >= 0, "0 or more", "0 means no clipping"),
    ):
        if not (fits and math.isfinite(value)):
            raise ConfigError(f"inner.{field}", value, f"must be {expected}", remedy)
    if config.island.distributed_optimizer and inner.optimizer is not InnerOptimizer.adamw:
        raise ConfigError(
            "island.distributed_optimizer",
            True,
            f"Megatron's works with AdamW only, not with inner.optimizer={inner.optimizer.value}",
            "Set it to false, or inner=adamw",
        )


def _check_model(model: ModelConfig) -> None:
    for field, value in {
        "rope_base": model.rope_base,
        "norm_epsilon": model.norm_epsilon,
        "init_std": model.init_std,
    }.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"model.{field}", value, "must be positive", "See conf/model/ for usual values")
    if model.hidden_size % model.heads:
        raise ConfigError(
            "model.heads", model.heads, f"does not divide model.hidden_size={model.hidden_size}", "Change one of them"
        )
    if (model.hidden_size // model.heads) % 2:
        raise ConfigError(
            "model.heads",
            model.heads,
            "gives an odd head size, which RoPE cannot rotate",
            "Change heads or hidden_size",
        )
    if model.heads % model.kv_heads:
        raise ConfigError(
            "model.kv_heads", model.kv_heads, f"does not divide heads={model.heads}", "Change one of them"
        )
    if model.sequence_length > model.max_position:
        raise ConfigError(
            "model.sequence_length",
            model.sequence_length,
            f"is longer than model.max_position={model.max_position}",
            "Shorten the sequence or raise max_position",
        )


def _check_layout(config: Config) -> None:
    model, island = config.model, config.island
    for field, value in {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_multiple": model.vocab_multiple,
    }.items():
        if value % island.tp:
            raise ConfigError("island.tp", island.tp, f"does not divide model.{field}={value}", "Choose another tp")
    samples = island.micro_batch_size * island.dp
    if island.batch_size % samples:
        raise ConfigError(
            "island.batch_size",
            island.batch_size,
            f"is no multiple of micro_batch_size × dp = {samples}",
            "Change batch_size or micro_batch_size",
        )
    if island.sequence_parallel and island.tp == 1:
        raise ConfigError("island.sequence_parallel", True, "needs tp of at least 2", "Set it to false")
    if island.sequence_parallel and model.sequence_length % island.tp:
        raise ConfigError(
            "island.sequence_parallel",
            True,
            f"tp={island.tp} does not divide model.sequence_length={model.sequence_length}",
            "Change model.sequence_length, or set it to false",
        )


def _check_pipeline(config: Config) -> None:
    model, island = config.model, config.island
    if model.layers % (island.pp * island.virtual_pp):
        raise ConfigError(
            "island.pp",
            island.pp,
            f"pp × virtual_pp = {island.pp * island.virtual_pp} does not divide model.layers={model.layers}",
            "Choose another pp or virtual_pp",
        )
    if island.virtual_pp == 1:
        return
    if island.pp == 1:
        raise ConfigError("island.virtual_pp", island.virtual_pp, "interleaving needs pp of at least 2", "Set it to 1")
    if island.microbatches % island.pp:
        raise ConfigError(
            "island.batch_size",
            island.batch_size,
            f"gives {island.microbatches} microbatches; interleaving needs a multiple of pp={island.pp}",
            "Change batch_size or micro_batch_size",
        )
    if config.evaluation.batches % island.pp:
        raise ConfigError(
            "evaluation.batches",
            config.evaluation.batches,
            f"interleaving needs a multiple of pp={island.pp}",
            "Change it, or set island.virtual_pp=1",
        )


def _check_schedule(config: Config) -> None:
    inner_steps = config.schedule.get("inner_steps")
    if isinstance(inner_steps, int) and inner_steps > config.steps:
        raise ConfigError(
            "schedule.inner_steps", inner_steps, f"no round would fit into steps={config.steps}", "Raise steps"
        )
    if config.data.virtual_shards < 2 * config.islands * config.island.dp:
        raise ConfigError(
            "data.virtual_shards",
            config.data.virtual_shards,
            f"too few for {config.islands} islands with dp={config.island.dp} and a held-out split",
            "Raise it (1024 is usual)",
        )
