"""Bytes that training keeps for backward: activations and logits of one rank.

The method is that of Korthikanti et al. (arXiv 2205.05198, section 4): count the tensors that each operation saves. The
tensors are those of this model: attention is a fused kernel that keeps no [sequence, sequence] matrix, and there is no
dropout. A test compares with what autograd saves on a CPU; of GPUs it is known from the kernels, not measured.
"""

from dilocox.config import Config, Recompute
from dilocox.parameters import FP32, element_bytes, uses_gpu
from dilocox.topology import Lane


def in_flight(config: Config, stage: int) -> int:
    """Forward passes of a model chunk whose activations a stage holds at once, under 1F1B or its interleaved form."""
    island = config.island
    waiting = island.pp - stage - 1
    if island.virtual_pp > 1:
        waiting = 2 * waiting + (island.virtual_pp - 1) * island.pp
    return min(waiting + 1, island.microbatches * island.virtual_pp)


def activation_bytes(config: Config, lane: Lane) -> int:
    """Peak of a step: what passes in flight keep, and what backward needs for a moment."""
    model, island = config.model, config.island
    tokens = model.sequence_length * island.micro_batch_size
    recomputed = _tokens_bytes(config, _layer(config)) if island.recompute is Recompute.full else 0
    gradients = tokens * element_bytes(config) * (3 * model.ffn_hidden_size // island.tp + 2 * model.hidden_size)
    final_norm = _tokens_bytes(config, _norm(config)) if lane.pp == island.pp - 1 else 0
    return in_flight(config, lane.pp) * kept_by_chunk(config) + final_norm + recomputed + gradients


def kept_by_chunk(config: Config) -> int:
    """What the layers of one model chunk keep of one microbatch."""
    island = config.island
    layers = config.model.layers // (island.pp * island.virtual_pp)
    one = _stream(config) * element_bytes(config) if island.recompute is Recompute.full else _layer(config)
    return layers * _tokens_bytes(config, one)


def logit_bytes(config: Config, vocab_size: int, lane: Lane) -> int:
    """On the last stage: the fp32 softmax, which becomes the gradient; under bf16 also logits and gradient in bf16."""
    if lane.pp < config.island.pp - 1:
        return 0
    element = element_bytes(config)
    cast = 2 * element if element < FP32 else 0
    return _tokens_bytes(config, config.model.padded_vocab(vocab_size) // config.island.tp * (FP32 + cast))


def _tokens_bytes(config: Config, bytes_per_token: float) -> int:
    return round(config.model.sequence_length * config.island.micro_batch_size * bytes_per_token)


def _stream(config: Config) -> int:
    """Elements of the hidden state that a rank holds of a token, on average, outside the tensor parallel regions."""
    island = config.island
    return config.model.hidden_size // island.tp if island.sequence_parallel else config.model.hidden_size


def _layer(config: Config) -> float:
    """Bytes a token that one layer keeps.

    Split over tp: the qkv buffer (v is a view of it), rotated q and k, attention's output, the input of fc2, fc1's
    output; where SwiGLU is not fused (on CPUs) its two factors, too. Attention keeps a log-sum-exp a head, unless it is
    recomputed. Not split: two norms, and cosine and sine of the rotation, for q and for k, which serve a microbatch.
    """
    model, island, element = config.model, config.island, element_bytes(config)
    head = model.hidden_size // model.heads
    kv = head * model.kv_heads
    attention = (model.hidden_size + 2 * kv) + (model.hidden_size + kv) + model.hidden_size
    feed_forward = (3 if uses_gpu(config) else 5) * model.ffn_hidden_size
    log_sum_exp = 0 if island.recompute is Recompute.selective else FP32 * model.heads
    rotation = 4 * head * element / island.micro_batch_size
    return 2 * _norm(config) + ((attention + feed_forward) * element + log_sum_exp) / island.tp + rotation


def _norm(config: Config) -> int:
    """Bytes a token that an RMSNorm keeps, with the matrix that reads it: input, output, and one fp32 factor.

    torch's CPU version keeps, instead of the input, its fp32 copy and the normalised fp32 values.
    """
    element = element_bytes(config)
    inputs = element if uses_gpu(config) else 2 * FP32
    split = config.island.tp if config.island.sequence_parallel else 1
    return _stream(config) * (inputs + element) + FP32 // split
