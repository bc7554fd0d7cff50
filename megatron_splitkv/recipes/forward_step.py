"""The drafter's forward step where Megatron-Bridge holds the state instead of globals."""

from collections.abc import Iterator
from functools import partial

import torch
from megatron.bridge.training.state import GlobalState

from megatron_splitkv.train.forward_step import ForwardStep, LossOutputs


class BridgeForwardStep:
    """`train.forward_step.ForwardStep` for Bridge's ``pretrain()``, which hands the state over."""

    def __init__(self) -> None:
        self._step: ForwardStep | None = None

    def __call__(
        self,
        state: GlobalState,
        data_iterator: Iterator[dict[str, torch.Tensor]],
        model: torch.nn.Module,
    ) -> tuple[torch.Tensor, partial[LossOutputs]]:
        """Run the model on the next micro-batch.

        Args:
            state: Bridge's; the timers are used, and the target in the job of its dataset.
            data_iterator: collated packs.
            model: the wrapped drafter.

        Returns:
            This rank's loss, and the function that gives Bridge (loss, token count, report).
        """
        if self._step is None:  # not earlier: its traffic meter counts from its making on
            self._step = ForwardStep(
                timers=lambda: state.timers,
                progress=lambda: state.train_state.step / state.cfg.train.train_iters,
                open_target=state.cfg.dataset.open_target,
            )
        return self._step(data_iterator, model)
