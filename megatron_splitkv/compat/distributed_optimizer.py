"""Megatron's distributed optimizer, where the supported releases save or load it wrongly.

Two things, mended in subclasses that Megatron builds in its stead:

* Buckets. The reshardable checkpoint format gathers a buffer without the padding at the ends of its
  buckets, then looks parameters up at offsets that count it. Every parameter behind the first
  padding is saved with numbers of its neighbours. It shows where several buckets meet sizes that
  128 and the data-parallel size do not divide.
* torch's Adam, used where neither Transformer Engine nor apex is. Their fused Adams count steps
  once a parameter group, torch's once a parameter, in a tensor. Over that tensor Megatron stumbles
  three times: it saves nothing before the first step, it looks for the tensor among what a
  checkpoint holds of a parameter, and after loading it lets all parameters count in one and the
  same tensor, so that with n parameters every step counts n times and the bias correction is
  silently wrong.

Source: the first fault and its cause, NVIDIA/Megatron-LM pull request 5077.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch


def mend_distributed_optimizer() -> None:
    """Let Megatron build a distributed optimizer whose checkpoints are right.

    Calling it again does nothing more. Where nothing is wrong nothing is changed.
    """
    optimizers = importlib.import_module("megatron.core.optimizer")
    mended = _mended(bool(optimizers.USING_PYTORCH_OPTIMIZER))
    setattr(optimizers, "DistributedOptimizer", mended)  # noqa: B010 (the global of its builder)


@functools.cache
def _mended(uses_torch_adam: bool) -> type[Any]:
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer: type[Any] = module.DistributedOptimizer
    # The releases with the fault pad what they fail to find; the mended one has no need to.
    if "functional.pad(" in inspect.getsource(optimizer.sharded_param_state_fully_reshardable):
        optimizer = _with_bucket_padding(optimizer)
    return _for_torch_adam(optimizer) if uses_torch_adam else optimizer


def _with_bucket_padding(upstream: type[Any]) -> type[Any]:
    class PaddedDistributedOptimizer(upstream):
        """Gathers buffers in the layout that its reshardable checkpoints look parameters up in."""

        get_parameter_state_dp_zero: Callable[..., Any]

        def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
            gather = self.get_parameter_state_dp_zero
            # For this call only: the other formats want the buffers without padding.
            self.get_parameter_state_dp_zero = lambda *a, **k: self._pad_buckets(gather(*a, **k))
            try:
                return super().sharded_param_state_fully_reshardable(*args, **kwargs)
            finally:
                del self.get_parameter_state_dp_zero

        def _pad_buckets(self, state: dict[Any, Any] | None) -> dict[Any, Any] | None:
            """Put the padding of all buckets back; None is what ranks get that gather nothing."""
            if state is None:
                return None
            for index, buffer in enumerate(self.buffers):
                for dtype, tensors in state[index].items():
                    state[index][dtype] = {
                        key: _padded(value, buffer) if torch.is_tensor(value) else value
                        for key, value in tensors.items()
                    }
            return state

    return PaddedDistributedOptimizer


def _padded(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """A buffer's numbers at the offsets of the buffer itself."""
    whole = compact.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start:end]
        start = end
    return whole


def _for_torch_adam(upstream: type[Any]) -> type[Any]:
    class TorchDistributedOptimizer(upstream):
        """The distributed optimizer around `torch.optim.AdamW` or `torch.optim.Adam`."""

        def state_dict(self) -> dict[str, Any]:
            """What is the same on all ranks, also before the first step: then it says step 0."""
            self._complete_state()
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load, and give every parameter a step count of its own."""
            super().load_state_dict(state_dict)
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

        def _set_main_param_and_optimizer_states(
            self, model_param: torch.Tensor, tensors: dict[str, Any]
        ) -> None:
            # The step came with the parameter groups; what is no tensor is left alone here.
            super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

        def _complete_state(self) -> None:
            """Add what torch's Adam adds in its first step; Megatron adds the moments alone."""
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    for moment in ("exp_avg", "exp_avg_sq"):
                        if moment not in state:
                            state[moment] = torch.zeros_like(parameter)
                    state.setdefault("step", torch.zeros(()))

    return TorchDistributedOptimizer
