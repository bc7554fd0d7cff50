"""Train a DFlash drafter with split-KV context parallelism under Megatron's ``pretrain()``.

    torchrun --nproc-per-node 2 -m megatron_splitkv.pretrain_dflash \\
        --context-parallel-size 2 --cp-comm-type splitkv --calculate-per-token-loss \\
        --feature-store DIR --num-layers 2 --block-size 8 --num-anchors 24 \\
        --seq-length 2048 --train-iters 700 --save CHECKPOINTS

All of Megatron's arguments apply; ``--help`` lists ours under "split-KV drafter training". On a
machine without a GPU the same command trains on the CPU with gloo.
"""

from megatron_splitkv import compat
from megatron_splitkv.train.launch import exit_on_config_error, quiet_imports


def main() -> None:
    """Parse, check, train."""
    with exit_on_config_error():
        with quiet_imports():
            compat.check_environment()
            # Megatron is imported only now: if it is missing, a line says so.
            from megatron_splitkv.train.forward_step import ForwardStep
            from megatron_splitkv.train.providers import DatasetsProvider, ModelProvider
            from megatron_splitkv.train.setup import prepare_training

        setup = prepare_training()
        compat.run_pretrain(
            setup.args,
            datasets_provider=DatasetsProvider(setup),
            model_provider=ModelProvider(setup),
            forward_step=ForwardStep(open_target=setup.open_target),
        )


if __name__ == "__main__":
    main()
