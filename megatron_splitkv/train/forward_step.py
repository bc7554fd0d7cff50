"""One micro-batch through the drafter, and what the log says about it: Megatron's forward step."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_timers, print_rank_0

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.strategies import LAYER_LABELS
from megatron_splitkv.batch import Prefetch, get_online_batch_on_this_cp_rank
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.online.source import OnlineTarget
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.train.dataset import split_batch
from megatron_splitkv.train.online_arguments import OpenTarget
from megatron_splitkv.train.same_plan import check_same_plan, host_group

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
    - ``plan wait ms``: how long a rank stood until its pack was read and planned.
    - ``bytes per layer``: what a rank sends in one layer, forward and backward.
    - ``target bytes``, with a target in the job: what a rank sends to bring the features that it
      computed to the ranks of the plan.

    It counts what is sent, and reads ahead, until it is closed or dropped or the process exits.

    Args:
        timers: returns Megatron's timers; by default its global ones.
        progress: returns the share of the training that is done, in [0, 1).
        open_target: makes the target that computes the features of packs that come without.
    """

    def __init__(
        self,
        timers: Callable[[], Any] = get_timers,
        progress: Callable[[], float] = lambda: training_progress(get_args()),
        open_target: OpenTarget | None = None,
    ) -> None:
        self._timers = timers
        self._progress = progress
        self._open_target = open_target
        self._target: OnlineTarget | None = None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        opened = ExitStack()
        self._meter = opened.enter_context(CommMeter())
        self._ahead: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()
        opened.callback(_close_all, self._ahead)
        self._close = weakref.finalize(self, opened.close)
        self._plan_group: Any = None
        self._communication = ""
        self._began = False

    def __call__(
        self, data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, partial[LossOutputs]]:
        """Run the model on the next micro-batch.

        Returns:
            This rank's loss, and the function that gives Megatron (loss, token count, report).

        Raises:
            ConfigError: ranks that share the micro-batch have different plans for it.
        """
        timers = self._timers()
        timers("batch-generator", log_level=2).start()
        if (ahead := read_ahead(data_iterator)) is not None:
            self._ahead.add(ahead)
        asked = time.perf_counter()
        item = next(data_iterator)
        waited = time.perf_counter() - asked
        batch, arrays = split_batch(item)
        plan = ContextPlan.from_arrays(arrays)
        if not isinstance(batch, Pack):
            batch, trained_tokens = self._to_device(batch)
        timers("batch-generator").stop()

        drafter = unwrap_model(model)
        if not self._began:
            self._plan_group = host_group(drafter.pg_collection.tp_cp)
            self._communication = drafter.communication
        check_same_plan(plan, self._plan_group, self._communication)
        if not self._began:
            self._began = True
            places, attention = drafter.places(plan), drafter.decoder.layers[0].self_attention
            said = places.reason
            if attention.strategy == "splitkv":
                said += _how_queries_travel(plan, attention.options, attention.node_ranks)
            print_rank_0(said)

        of_target: dict[str, tuple[float, float]] = {}
        if isinstance(batch, Pack):
            timers("online-target", log_level=2).start()
            batch, trained_tokens = self._to_device(self._online_batch(batch, plan, drafter))
            of_target = {"target bytes": (float(self._meter.bytes()), 1.0)}
            timers("online-target").stop()

        drafter.training_progress = self._progress()
        self._meter.clear()
        loss, num_tokens, report = model(batch, plan)
        num_layers = drafter.dflash.num_layers
        mine = {
            "trained tokens per pack": (trained_tokens, 1.0 / plan.cp_size),
            "plan imbalance": (plan.imbalance, 1.0),
            "plan wait ms": (1e3 * waited, 1.0),
            "bytes per layer": (self._layer_bytes() / num_layers, 1.0),
            **of_target,
        }
        # One copy, which the host does not wait for.
        pairs = torch.tensor(list(mine.values())).to(loss, non_blocking=True)
        report = {_log_name(name): pair for name, pair in report.items()}
        report |= dict(zip(mine, pairs, strict=True))
        self._add_backward(loss, report["bytes per layer"], num_layers)
        return loss, partial(_loss_outputs, num_tokens, report)

    def close(self) -> None:
        """Leave the meter and end the threads that read ahead; the step cannot be used again."""
        self._close()

    def _to_device(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        """The batch where the model is, and how many slots of it are trained."""
        trained_tokens = int(batch["block_label_mask"].sum())  # before it moves: no device waits
        moved = {name: rows.to(self.device, non_blocking=True) for name, rows in batch.items()}
        return moved, trained_tokens

    def _online_batch(self, pack: Pack, plan: ContextPlan, drafter: Any) -> dict[str, torch.Tensor]:
        """The batch of a pack whose features the target computes now."""
        groups, dflash = drafter.pg_collection, drafter.dflash
        if self._target is None:
            assert self._open_target is not None, "packs without features need a target"
            self._target = self._open_target(groups)
        features, final_hidden = self._target.states(
            pack.token_ids, pack.cu_seqlens, groups.cp.rank()
        )
        self._meter.clear()  # of what the target's own layers moved
        return get_online_batch_on_this_cp_rank(
            pack,
            plan,
            self._target.source(pack.cu_seqlens),
            features,
            groups.cp,
            mask_token_id=dflash.mask_token_id,
            label_shift=dflash.label_shift,
            final_hidden=final_hidden if dflash.needs_final_hidden else None,
        )

    def _add_backward(self, loss: torch.Tensor, pair: torch.Tensor, num_layers: int) -> None:
        """Add to a layer's bytes what backward sends, when it has."""

        def add_backward() -> None:
            pair[0] = self._layer_bytes() / num_layers

        def when_backward_begins(grad: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(add_backward)

        if loss.requires_grad:
            loss.register_hook(when_backward_begins)

    def _layer_bytes(self) -> float:
        """What the layers moved; what the embedding and the loss move is not among it."""
        return sum(r.bytes for r in self._meter.records if r.label in LAYER_LABELS)


def _how_queries_travel(plan: ContextPlan, options: SplitKVOptions, node_ranks: int) -> str:
    """For the first line: to whom, and whether what the user said about nodes matters."""
    cast = plan.resolve_cast(options.query_cast, node_ranks=node_ranks)
    said = f"; this pack's queries go to {_WHOM[cast]}"
    asked = options.ranks_per_node
    if asked is None or asked == 1:
        return said
    if node_ranks == 1:
        why = (
            f"{plan.cp_size} context-parallel ranks are not several nodes of equally many ranks "
            f"with {asked} ranks of the job on each"
        )
    elif cast == "group":
        why = "what returns to few ranks takes one level"
    else:
        return said
    return f"{said}; --splitkv-ranks-per-node {asked} has no effect: {why}"


def training_progress(args: Any) -> float:
    """Share of the training that is done before this step, the same after a resume.

    Args:
        args: Megatron's, of which `curr_iteration` counts finished steps.
    """
    done: int = getattr(args, "curr_iteration", 0)  # an evaluation may come before the first step
    return done / args.train_iters if args.train_iters else 0.0


def read_ahead(
    data_iterator: Iterator[dict[str, torch.Tensor]],
) -> Prefetch[dict[str, torch.Tensor]] | None:
    """Have the packs of Megatron's iterator read and planned on a thread, one ahead of the step.

    Done once for every iterator, those of evaluations too. Inside of what Megatron keeps for a
    replay, so that a replayed step sees its own packs and none that were read ahead. Iterators of
    others are left as they are: who else takes from them is not known.

    Args:
        data_iterator: what Megatron hands to a forward step; changed in place.

    Returns:
        What reads ahead; None for an iterator of others.
    """
    if not isinstance(data_iterator, RerunDataIterator):
        return None
    if not isinstance(data_iterator.iterable, Prefetch):
        data_iterator.iterable = Prefetch(data_iterator.iterable)
    return data_iterator.iterable


def _close_all(ahead: Iterable[Prefetch[Any]]) -> None:
    for prefetch in list(ahead):
        prefetch.close()


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
