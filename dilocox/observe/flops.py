"""Counting: FLOPs of the Llama-style model, and the share of the GPUs' peak that training reaches."""

from dilocox.config import ModelConfig
from dilocox.parameters import total_parameters

# Dense bf16 peak in FLOP/s from the vendors' data sheets, by a part of the name that CUDA gives; the first match is it.
PEAK_FLOPS = (
    ("A100", 312e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
)


def matmul_parameters(model: ModelConfig, padded_vocab_size: int) -> int:
    """Weights by which every token is multiplied: neither norms, nor an embedding that is looked up only."""
    norms = (2 * model.layers + 1) * model.hidden_size
    looked_up = 0 if model.tied_embeddings else model.hidden_size * padded_vocab_size
    return total_parameters(model, padded_vocab_size) - norms - looked_up


def flops_per_token(model: ModelConfig, padded_vocab_size: int) -> float:
    """FLOP of training on one token, the mean over a sequence, after PaLM (arXiv 2204.02311, appendix B).

    A multiplication and its addition are 2 FLOP; the backward pass costs twice the forward one; what recomputation
    repeats is not counted, nor are norms, RoPE, softmax and look-ups. Unlike PaLM's, attention scores are causal: a
    token attends to (sequence + 1) / 2 keys on average, not to the whole sequence.
    """
    keys = (model.sequence_length + 1) / 2
    attention_scores = model.layers * 2 * model.hidden_size * keys  # QKᵀ, and the probabilities times V
    return 3 * 2 * (matmul_parameters(model, padded_vocab_size) + attention_scores)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of one GPU in FLOP/s; None for CPUs, parts of a GPU (MIG) and names not in the table."""
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in PEAK_FLOPS if name in device_name), None)


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None, ranks: int) -> float | None:
    """Model FLOP utilisation: the part of the peak of `ranks` GPUs that the model's own arithmetic uses."""
    return None if peak_flops is None else tokens_per_s * flops_per_token / (peak_flops * ranks)
