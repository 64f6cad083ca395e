"""A Llama-style GPT of megatron-core: RMSNorm, SwiGLU, RoPE, grouped queries, no biases."""

from typing import Any

import torch
from torch import Tensor, nn

from dilocox.config import IslandConfig, ModelConfig, Precision, Recompute
from dilocox.islands.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    finalize_model_grads,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)
from dilocox.islands.world import World

RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    Recompute.none: {},
    Recompute.selective: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.full: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) that works under sequence parallelism; torch's refuses it in Megatron.

    Under it a rank sees a part of the sequence only; the mark on the weight makes Megatron sum its gradient over tp.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class CausalAttention(nn.Module):
    """Attention through torch's fused kernels: no [sequence, sequence] matrix is kept, on CPU or GPU."""

    def __init__(self, **unused: object) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **unused: object
    ) -> Tensor:
        """Query [sequence, batch, heads, head size], key and value with kv heads; to [sequence, batch, heads · size]"""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def build_chunks(
    model: ModelConfig, island: IslandConfig, precision: Precision, vocab_size: int, world: World
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `virtual_pp`), wrapped in Megatron's DDP. Weights are left to `initialise`.

    Collective over the island.
    """
    config = transformer_config(model, island, precision, world)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=island.distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    last = island.virtual_pp - 1
    chunks = []
    for index in range(island.virtual_pp):
        vp_stage = index if island.virtual_pp > 1 else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_block(config, vp_stage, world.lane.pp),
            vocab_size=model.padded_vocab(vocab_size),
            max_sequence_length=model.max_position,
            pre_process=world.lane.pp == 0 and index == 0,
            post_process=world.lane.pp == world.layout.pp - 1 and index == last,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rope_base,
            vp_stage=vp_stage,
        ).to(world.device)
        wrapped = Float16Module(config, chunk) if precision is Precision.bf16 else chunk
        chunks.append(DistributedDataParallel(config, ddp, wrapped))
    return chunks


def transformer_config(
    model: ModelConfig, island: IslandConfig, precision: Precision, world: World
) -> TransformerConfig:
    """Megatron's configuration of one island's model."""
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    on_gpu = world.device.type == "cuda"
    interleaved = island.virtual_pp > 1
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights get their values by global name afterwards. Megatron's own initialisation stays on, doing nothing,
        # because it also marks which parameters tp splits: without the marks the gradient norm is wrong.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        params_dtype=dtype,
        bf16=precision is Precision.bf16,
        tensor_model_parallel_size=island.tp,
        pipeline_model_parallel_size=island.pp,
        virtual_pipeline_model_parallel_size=island.virtual_pp if interleaved else None,
        sequence_parallel=island.sequence_parallel,
        pipeline_dtype=dtype,
        # Frees an output once it was handed to the transport. NCCL keeps the memory until it is sent; gloo sends what
        # lies there by then: wrong activations, in silence, in the interleaved schedule.
        deallocate_pipeline_outputs=on_gpu,
        # With Megatron's defaults the interleaved schedule trains on wrong gradients, in silence.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        finalize_model_grads_func=finalize_model_grads,
        # These fusions need apex's extensions, Transformer Engine or a GPU.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=on_gpu,
        cuda_graph_scope=[],  # what its deprecated default means
        **RECOMPUTE[island.recompute],
    )


def _block(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one chunk, with the norms and the attention of this module."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _leave(weight: Tensor) -> Tensor:
    return weight
