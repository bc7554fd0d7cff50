"""A plain GPT under Megatron's ``pretrain()``, with split-KV as its context parallelism.

    torchrun --nproc-per-node 2 examples/pretrain_gpt_splitkv.py \\
        --context-parallel-size 2 --cp-comm-type splitkv \\
        --spec megatron_splitkv.gpt_specs local_layer \\
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
        --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 20

``--spec`` names a layer with `SplitKVCoreAttention`. Without it the layers are Megatron's own, and
`megatron_splitkv.enable()` lets them obey ``--cp-comm-type``. All else is what a script for any
other ``--cp-comm-type`` does. The data are made up: counting in steps of 1 to 7.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from torch.utils.data import Dataset

import megatron_splitkv
from megatron_splitkv import compat
from megatron_splitkv.cpu import enable_cpu_mode
from megatron_splitkv.train.launch import exit_on_config_error

VOCAB_SIZE = 64
Batch = dict[str, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Defaults that let the command line above be short; Megatron's `extra_args_provider`."""
    parser.set_defaults(
        padded_vocab_size=VOCAB_SIZE,
        tokenizer_type="NullTokenizer",
        position_embedding_type="rope",
        normalization="RMSNorm",
        attention_dropout=0.0,  # split-KV has none
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        dataloader_type="single",
        eval_iters=0,
        eval_interval=1000,
        log_interval=1,
        use_cpu_initialization=True,  # the same weights at every context-parallel size
    )
    if not torch.cuda.is_available():
        fusions = ("masked_softmax", "bias_gelu", "bias_dropout", "gradient_accumulation")
        parser.set_defaults(
            distributed_backend="gloo",
            use_gloo_process_groups=False,
            transformer_impl="local",
            apply_rope_fusion=False,
            no_persist_layer_norm=True,
            num_workers=0,
            **{f"{name}_fusion": False for name in fusions},
        )
    return parser


class Counting(Dataset[Batch]):
    """Sequences that count upwards from some token in some step."""

    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        tokens = (5 * index + (1 + index % 7) * torch.arange(self.length + 1)) % VOCAB_SIZE
        positions = torch.arange(self.length)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "positions": positions}


def datasets_provider(num_samples: tuple[int, int, int]) -> tuple[Any, None, None]:
    return Counting(get_args().seq_length, num_samples[0]), None, None


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank makes its data


def model_provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> GPTModel:
    args = get_args()
    if args.spec is not None:
        layer = import_module(args.spec)
    elif args.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec()
    else:
        layer = get_gpt_layer_local_spec(normalization=args.normalization)
    return GPTModel(
        compat.transformer_config(args),
        layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
    )


def zigzag(batch: Batch, rank: int, size: int) -> Batch:
    """This rank's rows in Megatron's order: pieces `rank` and `2 size - 1 - rank` of `2 size`."""
    pieces = {name: x.chunk(2 * size, dim=1) for name, x in batch.items()}
    return {name: torch.cat([x[rank], x[-1 - rank]], dim=1) for name, x in pieces.items()}


def forward_step(data_iterator: Iterator[Batch], model: GPTModel) -> tuple[torch.Tensor, Any]:
    rank = parallel_state.get_context_parallel_rank()
    batch = zigzag(next(data_iterator), rank, parallel_state.get_context_parallel_world_size())
    tokens, labels, positions = (batch[x].cuda() for x in ("tokens", "labels", "positions"))
    return model(tokens, positions, None, labels=labels), loss_function


def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum, number of tokens, and what the log shows: Megatron adds all of them over ranks."""
    total, count = losses.float().sum(), torch.tensor(losses.numel(), device=losses.device)
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count.float()])}


def main() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron demands it
    with exit_on_config_error():
        megatron_splitkv.enable()
        args = compat.parse_args(add_arguments)
        enable_cpu_mode()  # where there is no GPU
        compat.skip_missing_dataset_helpers()
        args.max_position_embeddings = args.max_position_embeddings or args.seq_length
        compat.validate_args(args)
        compat.publish_args(args)
        compat.run_pretrain(
            args,
            datasets_provider=datasets_provider,
            model_provider=model_provider,
            forward_step=forward_step,
        )


if __name__ == "__main__":
    main()
