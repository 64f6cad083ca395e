"""Global names and boxes: the same element has the same name and index at every layout."""

import pytest

from dilocox.islands.naming import EMBEDDING, OUTPUT, global_box, global_name
from dilocox.shards import Box


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.6.mlp.linear_fc1.weight"),
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.9.input_layernorm.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (OUTPUT, OUTPUT),
        (EMBEDDING, EMBEDDING),
    ],
)
def test_layers_are_numbered_over_the_whole_model(local: str, expected: str) -> None:
    assert global_name(local, [6, 9], tied_embeddings=False) == expected


def test_a_tied_output_layer_is_the_embedding() -> None:
    assert global_name(OUTPUT, [6], tied_embeddings=True) == EMBEDDING


def test_what_tp_does_not_split_is_whole() -> None:
    assert global_box("decoder.final_layernorm.weight", (8,), None, tp=4, tp_rank=3) == Box.whole((8,))


@pytest.mark.parametrize("split", [0, 1])
def test_a_split_dimension_is_larger_in_the_whole(split: int) -> None:
    box = global_box("decoder.layers.0.self_attention.linear_qkv.weight", (6, 4), split, tp=3, tp_rank=2)
    assert box.shape == (6, 4)
    assert box.global_shape == ((18, 4) if split == 0 else (6, 12))
    assert box.offset == ((12, 0) if split == 0 else (0, 8))


def test_gate_and_up_are_each_split() -> None:
    box = global_box("decoder.layers.0.mlp.linear_fc1.weight", (6, 4), 0, tp=2, tp_rank=1)
    assert box == Box(global_shape=(2, 6, 4), offset=(0, 3, 0), shape=(2, 3, 4))
    assert global_box("decoder.layers.0.mlp.linear_fc1.weight", (6, 4), None, tp=1, tp_rank=0) == Box.whole((2, 3, 4))
