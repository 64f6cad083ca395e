"""Codecs of the outer loop: settings that cannot work, and the thin way to dilocox_kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from dilocox.errors import ConfigError
from dilocox.outer.codecs.block import Block
from dilocox.outer.codecs.cast import Cast
from dilocox.outer.codecs.protocol import Codec, Codes, Destination, Origin
from dilocox_kernels.kernels import select
from dilocox_kernels.spans import Spans

INT4: dict[str, Any] = {
    "format": "int4",
    "block_size": 64,
    "scale_dtype": "fp16",
    "rounding": "nearest",
    "error_feedback": True,
    "residual_decay": 1.0,
    "residual_dtype": "fp32",
    "seed": 7,
}
BF16: dict[str, Any] = {"dtype": "bf16", "error_feedback": True, "residual_decay": 1.0, "residual_dtype": "fp32"}
KERNELS = select("auto", "cpu")
HERE = Origin(number=1, island=0, fragment=0, hop=0, start=0)
CONF = Path(__file__).parents[2] / "conf" / "codec"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "int5"),
        ("block_size", 48),
        ("block_size", 16),
        ("block_size", 512),
        ("block_size", 64.0),
        ("scale_dtype", "fp8"),
        ("rounding", "up"),
        ("residual_dtype", "fp16"),
        ("residual_decay", 1.5),
        ("residual_decay", -0.1),
        ("residual_decay", float("nan")),
        ("residual_decay", "all"),
    ],
)
def test_block_settings_that_cannot_work(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^codec.{field}={value!r}: "):
        Block(**INT4 | {field: value})


@pytest.mark.parametrize(("field", "value"), [("dtype", "fp16"), ("residual_decay", 2)])
def test_cast_settings_that_cannot_work(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^codec.{field}={value!r}: "):
        Cast(**BF16 | {field: value})


@pytest.mark.parametrize(
    ("file", "name", "bits"),
    [
        ("fp32", "fp32", 32),
        ("bf16", "bf16", 16),
        ("int8", "int8/64/fp16", 8.25),
        ("int4", "int4/64/fp16", 4.25),
        ("e2m1", "e2m1/64/fp16", 4.25),
        ("e3m0", "e3m0/64/fp16", 4.25),
        ("bins2", "bins2/64/fp16", 2.25),
    ],
)
def test_the_codecs_of_conf(file: str, name: str, bits: float) -> None:
    settings = OmegaConf.merge({"seed": 1}, {"codec": OmegaConf.load(CONF / f"{file}.yaml")})
    codec: Codec = instantiate(settings.codec)
    assert codec.name == name
    assert codec.error_feedback == (file != "fp32")
    assert 8 * codec.encoded_bytes(6400) / 6400 == bits


def encode(codec: Codec, delta: Tensor, residual: Tensor | None, origin: Origin) -> tuple[Tensor, Tensor, Tensor]:
    """(body, what was sent, what was kept)."""
    spans, sent, kept = Spans.whole(delta.numel()), torch.empty_like(delta), torch.empty_like(delta)
    body = torch.empty(codec.encoded_bytes(delta.numel()), dtype=torch.uint8)
    destination = Destination(body, residual, kept if codec.error_feedback else None)
    assert codec.encode(KERNELS, [delta], spans, None, origin, destination).finite
    codec.decode(KERNELS, Codes([body], [1.0], spans, origin.start), sent)
    return body, sent, kept


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_the_decay_weights_the_residual(decay: float) -> None:
    codec = Block(**INT4 | {"residual_decay": decay})
    delta, residual = torch.linspace(-1, 1, 64), torch.full((64,), 0.25)
    _, sent, kept = encode(codec, delta, residual, HERE)
    torch.testing.assert_close(sent + kept, delta + decay * residual)
    assert kept.abs().max() > 0


@pytest.mark.parametrize("field", ["number", "island", "fragment", "hop", "start"])
def test_random_rounding_is_the_messages_own(field: str) -> None:
    codec, delta = Block(**INT4 | {"rounding": "stochastic"}), torch.linspace(-1, 1, 640)
    first = encode(codec, delta, None, HERE)[0]
    assert torch.equal(first, encode(codec, delta, None, HERE)[0])
    assert not torch.equal(first, encode(codec, delta, None, replace(HERE, **{field: 64}))[0])
    assert not torch.equal(first, encode(Block(**INT4 | {"rounding": "stochastic", "seed": 8}), delta, None, HERE)[0])
