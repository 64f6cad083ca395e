"""What islands must have in common before they may train together, and what a run must share with its checkpoint."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from omegaconf import OmegaConf

from dilocox.config import Config, to_yaml
from dilocox.data.corpus import Corpus
from dilocox.errors import CheckpointError

ISLANDS_OWN = (
    "name",
    "runs_dir",
    "resume",
    "launcher",
    "device",
    "threads_per_rank",
    "outer_state_device",
    "kernels",
    "evaluation.",
    "checkpoint.keep_last",
    "observe.",
    "island.batch_size",
    "island.micro_batch_size",
    "island.precision",
    "island.recompute",
    "island.sequence_parallel",
    "inner.implementation",
    "data.path",
    "participation.",
)
"""Settings in which islands may differ: fields, or groups that end in a dot."""

BOUND_TO_CHECKPOINT = (
    "codec.",
    "corpus",
    "data.",
    "exchange.",
    "island.",
    "islands",
    "model.",
    "outer_optimizer._",
    "payload.",
    "seed",
)
"""What a resumed run cannot change: the saved state would not fit, or would mean something else."""


def identity_of(config: Config, corpus: Corpus, outer_device: torch.device) -> dict[str, object]:
    """Field names and JSON values that must be equal on all islands.

    Settings, corpus, tokenizer, version, and the kind of device that takes outer steps: a GPU and a CPU may round
    differently, and islands must not.
    """
    settings = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    assert isinstance(settings, dict)
    identity = {field: value for field, value in _flat(settings, "").items() if not _listed(field, ISLANDS_OWN)}
    return identity | {
        "corpus": corpus.fingerprint,
        "kind of outer device": outer_device.type,
        "tokenizer.vocabulary": corpus.tokenizer.vocab_size,
        "version": version("dilocox"),
    }


def check_checkpoint(identity: Mapping[str, object], stored: Mapping[str, object], path: object) -> None:
    """Raise CheckpointError, naming field and values, when this run cannot go on from one of identity `stored`."""
    for field in sorted(identity.keys() | stored.keys()):
        here, there = identity.get(field), stored.get(field)
        if here != there and _listed(field, BOUND_TO_CHECKPOINT):
            raise CheckpointError(
                f"{path} was saved with {field}={there!r}, this run has {here!r}. "
                f"Set it as it was, or start a new run with resume=never and another name"
            )


def _listed(field: str, entries: tuple[str, ...]) -> bool:
    return any(field == entry or (entry.endswith((".", "_")) and field.startswith(entry)) for entry in entries)


def _flat(settings: Mapping[Any, Any], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
