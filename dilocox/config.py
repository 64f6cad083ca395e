"""The typed schema of `conf/`, its composition from the command line, and the checks that cross groups.

Defaults live in `conf/` only: no field here has one. A role (codec, schedule, …) is a mapping with `_target_`; its
constructor is its schema, so that a new role is one Python file and one YAML file.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dilocox.errors import ConfigError
from dilocox.topology import Layout

ROLES = (
    "schedule",
    "participation",
    "payload",
    "codec",
    "exchange",
    "merge",
    "outer_optimizer",
    "apply",
)


class Launcher(Enum):
    local = "local"
    inprocess = "inprocess"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class StateDevice(Enum):
    same = "same"
    host = "host"


class Precision(Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class InnerOptimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


class AdamImplementation(Enum):
    auto = "auto"
    transformer_engine = "transformer_engine"
    apex = "apex"
    torch = "torch"


class Decay(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Source(Enum):
    stdlib = "stdlib"
    folder = "folder"
    jsonl = "jsonl"


class Tokenizer(Enum):
    bytes = "bytes"


class Console(Enum):
    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


class Wandb(Enum):
    off = "off"
    offline = "offline"
    online = "online"


@dataclass
class ModelConfig:
    name: str
    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    kv_heads: int
    sequence_length: int
    max_position: int
    tied_embeddings: bool
    rope_base: int
    norm_epsilon: float
    init_std: float
    vocab_multiple: int

    def padded_vocab(self, vocab_size: int) -> int:
        """The vocabulary rounded up to a multiple of `vocab_multiple`, whatever tp is."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass
class IslandConfig:
    tp: int
    pp: int
    virtual_pp: int
    dp: int
    batch_size: int
    micro_batch_size: int
    precision: Precision
    sequence_parallel: bool
    recompute: Recompute
    distributed_optimizer: bool

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp)

    @property
    def microbatches(self) -> int:
        """Microbatches of one dp rank in an inner step."""
        return self.batch_size // (self.micro_batch_size * self.dp)


@dataclass
class InnerConfig:
    optimizer: InnerOptimizer
    implementation: AdamImplementation
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay: Decay
    decay_steps: int
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip_grad: float


@dataclass
class DataConfig:
    source: Source
    path: str | None
    pattern: str
    text_field: str
    tokenizer: Tokenizer
    heldout_fraction: float
    virtual_shards: int


@dataclass
class EvaluationConfig:
    every_steps: int
    batches: int


@dataclass
class CheckpointConfig:
    every_steps: int
    keep_last: int


@dataclass
class ObserveConfig:
    log_every_steps: int
    console: Console
    wandb: Wandb
    wandb_project: str


@dataclass
class Config:
    name: str
    runs_dir: str
    islands: int
    steps: int
    seed: int
    resume: str
    launcher: Launcher
    device: Device
    threads_per_rank: int
    outer_state_device: StateDevice
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    observe: ObserveConfig
    model: ModelConfig
    island: IslandConfig
    inner: InnerConfig
    data: DataConfig
    algo_name: str
    schedule: dict[str, Any]
    participation: dict[str, Any]
    payload: dict[str, Any]
    codec: dict[str, Any]
    exchange: dict[str, Any]
    merge: dict[str, Any]
    outer_optimizer: dict[str, Any]
    apply: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("conf", str(package), "no folder conf/ with config.yaml", "Reinstall dilocox")


def load_config(overrides: Sequence[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, check types and keys, then what crosses groups.

    Raises ConfigError, which names the field and what to change.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
    except HydraException as error:
        raise _explain(error, overrides) from error
    return parse_config(composed)


def parse_config(composed: DictConfig) -> Config:
    """A composed or stored configuration as typed, checked `Config`."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _explain(error, ()) from error
    assert isinstance(config, Config)
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The resolved configuration, as written into the run's folder; `read_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_config(path: Path) -> Config:
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return parse_config(loaded)


def build_role(config: Config, role: str) -> Any:
    """Construct one role from its mapping; a key that its constructor does not know is a ConfigError."""
    settings = getattr(config, role)
    if "_target_" not in settings:
        raise ConfigError(role, settings, "no _target_", f"Choose one of: {', '.join(choices(role))}")
    try:
        return instantiate(settings)
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(role, settings, str(cause or error), f"See conf/{role}/ for its keys") from error


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def check(config: Config) -> None:
    """Refuse combinations that cannot work, before anything starts."""
    _check_positive(config)
    _check_model(config.model)
    _check_layout(config)
    _check_schedule(config)
    for role in ROLES:
        build_role(config, role)


def _explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Turn an error of Hydra or OmegaConf into one that names the field and the nearest known key."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        cause = cause.__cause__
    message = str(error).splitlines()[0]
    field = getattr(cause, "full_key", None) or next(
        (o.split("=")[0].lstrip("+~") for o in overrides if o.split("=")[0].lstrip("+~") in str(error)), "config"
    )
    value = next((o.split("=", 1)[1] for o in overrides if o.startswith(f"{field}=")), None)
    near = difflib.get_close_matches(str(field), _known_fields(), n=1)
    hint = f"Did you mean {near[0]}?" if near and near[0] != field else "See conf/ for the known keys and choices"
    return ConfigError(str(field), value, message, hint)


def _known_fields() -> list[str]:
    def walk(node: Any, prefix: str) -> list[str]:
        keys = [f"{prefix}{key}" for key in node]
        nested = [
            walk(node._get_node(key), f"{prefix}{key}.") for key in node if OmegaConf.is_config(node._get_node(key))
        ]
        return keys + [name for names in nested for name in names]

    return walk(OmegaConf.structured(Config), "")


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
    if config.inner.lr <= 0:
        raise ConfigError("inner.lr", config.inner.lr, "must be positive", "Try 1e-3")


def _check_model(model: ModelConfig) -> None:
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
    if model.layers % (island.pp * island.virtual_pp):
        raise ConfigError(
            "island.pp",
            island.pp,
            f"pp × virtual_pp = {island.pp * island.virtual_pp} does not divide model.layers={model.layers}",
            "Choose another pp or virtual_pp",
        )
    if island.virtual_pp > 1 and island.pp < 2:
        raise ConfigError("island.virtual_pp", island.virtual_pp, "interleaving needs pp of at least 2", "Set it to 1")
    samples = island.micro_batch_size * island.dp
    if island.batch_size % samples:
        raise ConfigError(
            "island.batch_size",
            island.batch_size,
            f"is no multiple of micro_batch_size × dp = {samples}",
            "Change batch_size or micro_batch_size",
        )
    if island.virtual_pp > 1 and island.microbatches % island.pp:
        raise ConfigError(
            "island.batch_size",
            island.batch_size,
            f"gives {island.microbatches} microbatches; interleaving needs a multiple of pp={island.pp}",
            "Change batch_size or micro_batch_size",
        )
    if island.sequence_parallel and island.tp == 1:
        raise ConfigError("island.sequence_parallel", True, "needs tp of at least 2", "Set it to false")
    if island.sequence_parallel and model.sequence_length % island.tp:
        raise ConfigError(
            "island.sequence_parallel", True, f"tp={island.tp} does not divide the sequence", "Change sequence_length"
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
