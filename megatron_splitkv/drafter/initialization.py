"""Initial weights that depend on a seed and a parameter's name alone.

Not on the tensor-, context- or data-parallel layout, the device, the order of construction, or
whatever else drew random numbers: a run at another layout starts from the same drafter.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.drafter.vocabulary_matrix import vocabulary_rows

# Projections into the residual stream, which Megatron scales down with depth.
_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def initialize_weights(
    module: torch.nn.Module,
    *,
    init_method: Callable[[torch.Tensor], object],
    output_layer_init_method: Callable[[torch.Tensor], object],
    tp_group: dist.ProcessGroup | None,
    seed: int,
) -> None:
    """Draw every matrix as a whole on the CPU and keep this TP rank's part; norms stay as built.

    Args:
        module: built by Megatron, whose partition attributes the parameters carry.
        init_method: fills a matrix.
        output_layer_init_method: fills a matrix that writes into the residual stream.
        tp_group: ranks that share the matrices.
        seed: equal seeds give equal weights.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        method = output_layer_init_method if name.endswith(_INTO_RESIDUAL) else init_method
        if (vocab_size := getattr(parameter, "vocab_size", None)) is not None:
            whole = torch.empty(vocab_size, *parameter.shape[1:], dtype=torch.float32)
            _draw(whole, method, f"{seed}/{name}")
            parameter.copy_(whole[vocabulary_rows(vocab_size, tp_group)])
            continue
        is_split = getattr(parameter, "tensor_model_parallel", False)
        size = group_size(tp_group) if is_split else 1
        axis = getattr(parameter, "partition_dim", 0) if is_split else 0
        stride = getattr(parameter, "partition_stride", 1) if is_split else 1
        shape = list(parameter.shape)
        shape[axis] *= size
        whole = torch.empty(shape, dtype=torch.float32)
        _draw(whole, method, f"{seed}/{name}")
        # With stride 2 (gate and up in one matrix) a rank holds a piece of each.
        pieces = whole.chunk(size * stride, dim=axis)
        rank = group_rank(tp_group) if is_split else 0
        parameter.copy_(torch.cat(pieces[rank::size], dim=axis))


def _draw(tensor: torch.Tensor, method: Callable[[torch.Tensor], object], key: str) -> None:
    """Run `method` with the CPU generator at a state of its own, and put the state back.

    The generator itself, not `torch.manual_seed`, which seeds every device.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1)
    method(tensor)
    generator.set_state(state)
