"""All that dilocox uses of megatron-core, imported in one place and in the right order.

First the look for PyPI's apex (Megatron takes it for NVIDIA's at import), then the shim where CUDA is absent, then
Megatron. Nothing else in dilocox imports `megatron`.
"""

import warnings

from dilocox.islands import shim
from dilocox.islands.adam import refuse_apex_impostor

# Said by Megatron of its own calls; there is nothing that a person who trains could do about it.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="If you are using transformer_engine .*recompute", category=UserWarning)
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)

refuse_apex_impostor()
with warnings.catch_warnings():
    # It says which optimizer and which norms it would fall back to; dilocox chooses them itself.
    warnings.filterwarnings("ignore", message="(Transformer Engine|Apex)", category=UserWarning)
    shim.apply()
    from megatron.core import optimizer as optimizer_module
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FP32Optimizer",
    "Float16Module",
    "Float16OptimizerWithFloat16Params",
    "GPTModel",
    "OptimizerConfig",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "distrib_optimizer",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "optimizer_module",
    "parallel_state",
    "tensor_parallel",
]
