"""The typed schema of `conf/`: groups, their fields and choices.

Defaults live in `conf/` only: no field here has one. A role (codec, schedule, …) is a mapping with `_target_`; its
constructor is its schema, so that a new role is one Python file and one YAML file.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

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


class KernelBackend(Enum):
    auto = "auto"
    reference = "reference"
    cpu = "cpu"
    triton = "triton"


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
    kernels: KernelBackend
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
