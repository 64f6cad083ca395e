"""The model of an island in plain torch on one device: the yardstick that tests and benchmarks compare with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilocox.config import ModelConfig


class PlainGPT(nn.Module):
    """A Llama-style GPT: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, no dropout.

    Parameters have the names that an island gives them (`dilocox.islands.naming`).
    """

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        padded = model.padded_vocab(vocab_size)
        self.embedding = Embedding(padded, model.hidden_size)
        self.decoder = Decoder(model)
        self.output_layer = None if model.tied_embeddings else nn.Linear(model.hidden_size, padded, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, in nats a token, over int64 [batch, sequence + 1] tokens."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        hidden = self.decoder(self.embedding.word_embeddings(inputs))
        output = self.embedding.word_embeddings if self.output_layer is None else self.output_layer
        logits = functional.linear(hidden, output.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take up an island's whole weights by name; raises KeyError when one is missing."""
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name].reshape(parameter.shape))  # an island's fc1 is [2, ffn, hidden]


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)


class Decoder(nn.Module):
    rotation: Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.final_layernorm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.register_buffer("rotation", _rotation(model), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        rotation = self.rotation[:, : hidden.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        normed: Tensor = self.final_layernorm(hidden)
        return normed


class Layer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.self_attention = Attention(model)
        self.pre_mlp_layernorm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = SwiGLU(model)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), rotation)
        mixed: Tensor = hidden + self.mlp(self.pre_mlp_layernorm(hidden))
        return mixed


class Attention(nn.Module):
    """Causal attention; the rows of `linear_qkv` are, for each kv head, its queries, its key, its value."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.kv_heads, self.queries = model.kv_heads, model.heads // model.kv_heads
        self.size = model.hidden_size // model.heads
        rows = (model.heads + 2 * model.kv_heads) * self.size
        self.linear_qkv = nn.Linear(model.hidden_size, rows, bias=False)
        self.linear_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        batch, sequence, _ = hidden.shape
        grouped = self.linear_qkv(hidden).view(batch, sequence, self.kv_heads, self.queries + 2, self.size)
        query, key, value = grouped.split([self.queries, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.linear_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """The gated feed-forward layer (arXiv 2002.05202); `linear_fc1` is [gate; up]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(model.hidden_size, 2 * model.ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.linear_fc1(hidden).chunk(2, dim=-1)
        projected: Tensor = self.linear_fc2(functional.silu(gate) * up)
        return projected


def _rotation(model: ModelConfig) -> Tensor:
    """Cosines and sines [2, position, head size] of rotary positions (arXiv 2104.09864)."""
    size = model.hidden_size // model.heads
    frequencies = model.rope_base ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(model.max_position).float(), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate [batch, head, sequence, size]: the first half of a head is paired with the second."""
    cosine, sine = rotation.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
