"""How much memory a rank needs, by part, before anything is built.

Weights, gradients, the inner optimiser and the outer state are counted exactly, padding included (a test compares them
with what an island allocates). Messages come from a rehearsal of the exchange. Activations are estimated in
`dilocox.activations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from dilocox.activations import activation_bytes, logit_bytes
from dilocox.config import Config, InnerOptimizer, StateDevice, load_config
from dilocox.method import build_roles
from dilocox.outer.fragments import CHUNK_ELEMENTS, Fragment
from dilocox.outer.roles import Roles
from dilocox.parameters import FP32, buffers, element_bytes, flat_numel, holdings, total_parameters, uses_gpu
from dilocox.shards import whole_shard
from dilocox.topology import Lane
from dilocox.traffic import rehearse

GIB = 1 << 30
RUNTIME_BYTES = 3 * GIB
"""Allowance on a GPU for the CUDA context, the buffers of NCCL and cuBLAS, and fragmentation: an assumption."""
SCRATCH_CHUNKS = 8
"""fp32 ranges of CHUNK_ELEMENTS in use at once while encoding, merging and stepping: an upper bound."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by part. Activations and sync buffers are never there together, so the peak has the larger."""

    lane: Lane
    weights: int
    gradients: int
    inner_optimizer: int
    outer_state: int
    """Anchor, slots of the outer optimiser, two residuals a hop; where `outer_state_device` says."""
    activations: int
    logits: int
    sync: int
    """Scratch, where the outer state lives; codes stay among the messages until a range is merged."""
    messages: int
    """This lane's messages of two syncs (kept until acknowledged), and those it receives; always in host memory."""
    runtime: int
    outer_on_host: bool
    on_cpu: bool

    @property
    def static(self) -> int:
        """What is there all the time on the device."""
        return self.weights + self.gradients + self.inner_optimizer + (0 if self.outer_on_host else self.outer_state)

    @property
    def device(self) -> int:
        """Peak on the GPU, or of the process where there is none."""
        sync = (0 if self.outer_on_host else self.sync) + (self.messages if self.on_cpu else 0)
        return self.static + max(self.activations + self.logits, sync) + self.runtime

    @property
    def host(self) -> int:
        """Peak in host memory that the outer loop adds beside a GPU."""
        return 0 if self.on_cpu else self.messages + (self.outer_state + self.sync if self.outer_on_host else 0)

    def parts(self) -> dict[str, int]:
        """Bytes by the name of the part, for tables."""
        names = ("weights", "gradients", "inner_optimizer", "outer_state", "activations", "logits", "sync", "messages")
        return {name.replace("_", " "): getattr(self, name) for name in (*names, "runtime")}


def estimate(config: Config, vocab_size: int) -> MemoryEstimate:
    """The rank of an island that needs most memory on its device; `vocab_size` is the tokenizer's."""
    return max(estimates(config, vocab_size).values(), key=lambda found: (found.device, found.host))


def estimates(config: Config, vocab_size: int) -> dict[Lane, MemoryEstimate]:
    """What each rank of an island needs."""
    roles = build_roles(config)
    sync = cache(partial(_sync, config, roles))  # most lanes have flat buffers of a few lengths
    return {lane: _estimate(config, vocab_size, lane, roles, sync) for lane in config.island.layout.lanes()}


def _estimate(
    config: Config, vocab_size: int, lane: Lane, roles: Roles, sync: Callable[[int], tuple[int, int]]
) -> MemoryEstimate:
    on_cpu = not uses_gpu(config)
    owned = holdings(config, vocab_size, lane)
    stepped = sum(holding.numel for holding in owned)
    buffered = sum(buffer.numel for buffer in buffers(config, vocab_size, lane))
    flat = flat_numel(owned, roles.codec.alignment)
    scratch, messages = sync(flat)
    return MemoryEstimate(
        lane=lane,
        weights=buffered * element_bytes(config),
        gradients=buffered * FP32,
        inner_optimizer=stepped * _inner_bytes(config),
        outer_state=_outer_state(config, roles, flat),
        activations=activation_bytes(config, lane),
        logits=logit_bytes(config, vocab_size, lane),
        sync=scratch,
        messages=messages,
        runtime=0 if on_cpu else RUNTIME_BYTES,
        outer_on_host=not on_cpu and config.outer_state_device is StateDevice.host,
        on_cpu=on_cpu,
    )


def _inner_bytes(config: Config) -> int:
    """fp32 main weights where the model's are bf16, and the moments."""
    momentum = 1 if config.inner.betas[0] else 0
    moments = 2 if config.inner.optimizer is InnerOptimizer.adamw else momentum
    return FP32 * (moments + (1 if element_bytes(config) < FP32 else 0))


def _outer_state(config: Config, roles: Roles, flat: int) -> int:
    fragment = Fragment("all", [whole_shard("flat", torch.empty(flat, device="meta"))], roles.codec.alignment)
    residuals = max(
        sum(stop - start for start, stop in roles.exchange.residual_ranges(fragment, island, config.islands))
        for island in range(config.islands)
    )
    tensors = flat * (1 + len(roles.outer_optimizer.slots)) if roles.payload.needs_anchor else 0
    return FP32 * (tensors + (2 * residuals if roles.codec.error_feedback else 0))


def _sync(config: Config, roles: Roles, flat: int) -> tuple[int, int]:
    """(scratch, messages)."""
    scratch = SCRATCH_CHUNKS * FP32 * min(CHUNK_ELEMENTS, flat)
    rehearsals = [rehearse(flat, roles, island, config.islands) for island in range(config.islands)]
    messages = max(2 * rehearsal.own_messages + rehearsal.received_messages for rehearsal in rehearsals)
    return scratch, messages


EXPERIMENTS = ("125m", "350m", "1.3b", "7b", "13b", "70b")
TABLE_VOCAB = 32_000
GPU_BYTES = 80 * 10**9
"""What an 80 GB GPU has at least."""


def table() -> str:
    """docs/models.md: the model configurations, and the memory of the rank that needs most."""
    configs = {"tiny": load_config(["island=tp2", "device=cpu"])}
    configs |= {name: load_config([f"experiment={name}"]) for name in EXPERIMENTS}
    rows = [_HEADING]
    shapes = ["parameters", "layers", "hidden", "FFN", "heads", "KV heads", "sequence", "tied"]
    rows += _row("model", *shapes) + _row("---", *["---:"] * len(shapes))
    for name, config in configs.items():
        model = config.model
        rows += _row(
            name,
            f"{total_parameters(model, TABLE_VOCAB) / 1e9:.3f} B",
            *(f"{n}" for n in (model.layers, model.hidden_size, model.ffn_hidden_size, model.heads, model.kv_heads)),
            f"{model.sequence_length}",
            "yes" if model.tied_embeddings else "no",
        )
    return "\n".join(rows + _memory_rows(configs)) + "\n"


def _memory_rows(configs: dict[str, Config]) -> list[str]:
    found = {name: estimate(config, TABLE_VOCAB) for name, config in configs.items()}
    parts = list(found["tiny"].parts())
    columns = ["island", "microbatch", "recompute", *parts, "peak", "of 80 GB", "host"]
    rows = [_MEMORY_HEADING, *_row("model", *columns), *_row("---", *["---:"] * len(columns))]
    for name, config in configs.items():
        island, needed = config.island, found[name]
        rows += _row(
            name,
            f"tp{island.tp} pp{island.pp} dp{island.dp}",
            f"{island.micro_batch_size}",
            island.recompute.value,
            *(f"{size / GIB:.3f}" for size in needed.parts().values()),
            f"{needed.device / GIB:.2f}",
            f"{needed.device / GPU_BYTES:.0%}",
            f"{needed.host / GIB:.2f}",
        )
    return rows


def _row(*cells: str) -> list[str]:
    return ["| " + " | ".join(cells) + " |"]


_HEADING = f"""# Models and the memory that they need

Written by `python -m dilocox.memory > docs/models.md`; a test holds it equal to the code. A vocabulary of
{TABLE_VOCAB:,} is assumed (the byte-level tokenizer has far fewer entries).
"""
_MEMORY_HEADING = """
## Memory of the rank that needs most, in GiB

`dilocox train experiment=NAME` chooses the model with this island layout; `tiny` is the default model on two CPU ranks.
The outer state and the inner optimiser are divided by dp. The peak has all parts but, of activations with logits on one
side and sync buffers on the other, the larger. Messages wait in host memory. Recomputing attention alone (`selective`)
saves nearly nothing, because the fused kernel does so itself. Tests compare what is there all the time with real
allocations of tiny models, and activations with what autograd keeps, on CPUs. No number here was measured on a GPU, and
the runtime part (CUDA context, NCCL, cuBLAS, fragmentation) is an allowance.
"""

if __name__ == "__main__":
    print(table(), end="")
