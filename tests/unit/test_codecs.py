"""Codecs of the outer loop: settings that cannot work, and the thin way to dilocox_kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from dilocox.errors import ConfigError
from dilocox.outer.codecs.block import Block
from dilocox.outer.codecs.cast import Cast
from dilocox.outer.codecs.protocol import Codec

INT4: dict[str, Any] = {
    "format": "int4",
    "block_size": 64,
    "scale_dtype": "fp16",
    "error_feedback": True,
    "residual_decay": 1.0,
}
BF16: dict[str, Any] = {"dtype": "bf16", "error_feedback": True, "residual_decay": 1.0}
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
    [("fp32", "fp32", 32), ("bf16", "bf16", 16), ("int8", "int8/64/fp16", 8.25), ("int4", "int4/64/fp16", 4.25)],
)
def test_the_codecs_of_conf(file: str, name: str, bits: float) -> None:
    codec: Codec = instantiate(OmegaConf.load(CONF / f"{file}.yaml"))
    assert codec.name == name
    assert codec.error_feedback == (file != "fp32")
    assert 8 * codec.encoded_bytes(6400) / 6400 == bits


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_the_decay_weights_the_residual(decay: float) -> None:
    codec = Block(**INT4 | {"residual_decay": decay})
    delta, residual, kept, sent = torch.linspace(-1, 1, 64), torch.full((64,), 0.25), torch.empty(64), torch.zeros(64)
    body = torch.empty(codec.encoded_bytes(64), dtype=torch.uint8)
    assert codec.encode(delta, residual, body, kept).finite
    codec.decode_accumulate(body, 1.0, sent)
    torch.testing.assert_close(sent + kept, delta + decay * residual)
    assert kept.abs().max() > 0
