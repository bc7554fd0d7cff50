"""One micro-batch through the drafter, and what the log says about it: Megatron's forward step."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training import get_timers, print_rank_0

from megatron_splitkv.attention.strategies import LAYER_LABELS
from megatron_splitkv.comm import CommMeter, all_reduce_max
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.train.dataset import split_batch

_WHOM = {"all": "all ranks", "group": "the ranks that hold keys which they see"}

type LossOutputs = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class ForwardStep:
    """Megatron's `forward_step_func` for a drafter.

    The report's values are (numerator, denominator) pairs that Megatron sums over ranks and
    micro-batches and then divides. Under their names in the log:

    - ``drafter loss``: weighted cross-entropy.
    - ``accept_len``: tokens per draft step that verification would have yielded.
    - ``accuracy/slot k``: share of slots k that are right.
    - ``trained tokens per pack``: supervised slots of a pack's blocks.
    - ``plan imbalance``: largest work of a rank over the mean, minus one.
    - ``bytes per layer``: what a rank sends in one layer, forward and backward.

    Args:
        timers: returns Megatron's timers; by default its global ones.
    """

    def __init__(self, timers: Callable[[], Any] = get_timers) -> None:
        self._timers = timers
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._meter = CommMeter()
        self._meter.__enter__()  # for as long as the process trains
        self._plans_compared = False

    def __call__(
        self, data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, partial[LossOutputs]]:
        """Run the model on the next micro-batch.

        Returns:
            This rank's loss, and the function that gives Megatron (loss, token count, report).
        """
        timers = self._timers()
        timers("batch-generator", log_level=2).start()
        batch, arrays = split_batch(next(data_iterator))
        plan = ContextPlan.from_arrays(arrays)
        trained_tokens = int(batch["block_label_mask"].sum())  # before it moves: no device waits
        batch = {name: rows.to(self.device, non_blocking=True) for name, rows in batch.items()}
        timers("batch-generator").stop()

        drafter = unwrap_model(model)
        if not self._plans_compared:
            for group in (drafter.tp_group, drafter.cp_group):
                check_same_plan(plan, group, self.device)
            self._plans_compared = True
            places, attention = drafter.places(plan), drafter.decoder.layers[0].self_attention
            cast = plan.resolve_cast(attention.options.query_cast)
            print_rank_0(f"{places.reason}; this pack's queries go to {_WHOM[cast]}")

        self._meter.clear()
        loss, num_tokens, report = model(batch, plan)
        report = {_log_name(name): pair for name, pair in report.items()}
        report["trained tokens per pack"] = loss.new_tensor([trained_tokens, 1.0 / plan.cp_size])
        report["plan imbalance"] = loss.new_tensor([plan.imbalance, 1.0])
        report["bytes per layer"] = self._traffic(loss, drafter.dflash.num_layers)
        return loss, partial(_loss_outputs, num_tokens, report)

    def _traffic(self, loss: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Bytes that this rank sends in a layer; backward's are added when backward has run."""
        pair = loss.new_tensor([self._layer_bytes() / num_layers, 1.0])

        def add_backward() -> None:
            pair[0] = self._layer_bytes() / num_layers

        def when_backward_begins(grad: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(add_backward)

        if loss.requires_grad:
            loss.register_hook(when_backward_begins)
        return pair

    def _layer_bytes(self) -> float:
        """What the layers moved; what the embedding and the loss move is not among it."""
        return sum(r.bytes for r in self._meter.records if r.label in LAYER_LABELS)


def check_same_plan(
    plan: ContextPlan, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Refuse to train when ranks that share a micro-batch have different plans for it.

    Args:
        plan: this rank's plan.
        group: ranks that must agree.
        device: where a collective's tensors live.

    Raises:
        ConfigError: on every rank of the group.
    """
    digest = int(plan.digest[:15], 16)
    extremes = torch.tensor([digest, -digest], device=device)
    largest, smallest = all_reduce_max(extremes, group, label="plan_digest").tolist()
    if largest != -smallest:
        raise ConfigError(
            "ranks that share a micro-batch drew different anchors or plans for it; give all ranks "
            "the same command line, feature store and package version"
        )


def _loss_outputs(
    num_tokens: torch.Tensor, report: dict[str, torch.Tensor], loss: torch.Tensor
) -> LossOutputs:
    return loss, num_tokens, report


def _log_name(name: str) -> str:
    """``lm loss`` -> ``drafter loss``, ``slot_3_accuracy`` -> ``accuracy/slot 3``."""
    if name == "lm loss":
        return "drafter loss"
    if name.endswith("_accuracy"):
        return f"accuracy/{name.removesuffix('_accuracy').replace('_', ' ')}"
    return name
