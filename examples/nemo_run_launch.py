"""Start a NeMo recipe with NeMo-Run: here under torchrun, or as a Slurm job.

    python3 examples/nemo_run_launch.py qwen3-8b --dryrun dataset.feature_store=data/train
    python3 examples/nemo_run_launch.py qwen3.5-35b-a3b --executor slurm --account ACCOUNT \\
        --partition PARTITION --nodes 4 --time 04:00:00 --container-image IMAGE \\
        --mount /data:/data dataset.feature_store=/data/train checkpoint.save=/data/checkpoints

``--dryrun`` prints what would be started and starts nothing; it needs NeMo-Run, but no GPU, Slurm
or Megatron-Bridge. What follows the recipe's name goes to `megatron_splitkv.recipes.pretrain`,
which runs inside the job. The Slurm form is for a login node: it calls ``sbatch`` there.
"""

import argparse
import sys
from collections.abc import Sequence

try:
    import nemo_run as run
    from torchx.specs import AppState
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed; pip install -e '.[nemo]' brings NeMo-Run")

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.recipes import RECIPES
from megatron_splitkv.train.launch import exit_on_config_error

ENVIRONMENT = {
    # Kernels of several streams must start in the order in which Megatron launched them.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONUNBUFFERED": "1",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; of this process if `argv` is None."""
    parser = argparse.ArgumentParser(description="Start a NeMo recipe with NeMo-Run.")
    parser.add_argument("recipe", help=f"target of the drafter: {', '.join(RECIPES)}")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="of the recipe")
    parser.add_argument("--executor", default="local", help="local (default) or slurm")
    parser.add_argument("--gpus", type=int, default=8, help="processes per node (default 8)")
    parser.add_argument("--dryrun", action="store_true", help="print the job, start nothing")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--account", help="required")
    slurm.add_argument("--partition")
    slurm.add_argument("--nodes", type=int, default=1)
    slurm.add_argument("--time", default="04:00:00")
    slurm.add_argument("--container-image", help="has this package and megatron-bridge")
    slurm.add_argument("--mount", action="append", default=[], metavar="FROM:TO")
    slurm.add_argument("--job-dir", help="where NeMo-Run keeps scripts and logs on the cluster")
    return parser.parse_intermixed_args(argv)


def executor(args: argparse.Namespace) -> run.Executor:
    """Where the job runs, with one torchrun a node.

    Raises:
        ConfigError: an unknown executor, or a Slurm option that is missing or has no effect.
    """
    require_choice("--executor", args.executor, ("local", "slurm"))
    if args.executor == "local":
        if args.nodes != 1:
            raise ConfigError(
                f"--nodes {args.nodes} needs --executor slurm; a local job is this machine's"
            )
        return run.LocalExecutor(
            ntasks_per_node=args.gpus, launcher="torchrun", env_vars=dict(ENVIRONMENT)
        )
    if args.account is None:
        raise ConfigError("--account is missing; --executor slurm needs one")
    return run.SlurmExecutor(
        account=args.account,
        partition=args.partition,
        nodes=args.nodes,
        ntasks_per_node=args.gpus,
        gpus_per_node=args.gpus,
        time=args.time,
        container_image=args.container_image,
        container_mounts=args.mount,
        env_vars=dict(ENVIRONMENT),
        launcher="torchrun",
        tunnel=run.LocalTunnel(job_dir=args.job_dir or run.config.get_nemorun_home()),
        packager=run.Packager(),  # the image has the code
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Build the experiment, then show or start it."""
    args = parse(argv)
    with exit_on_config_error():
        require_choice("recipe", args.recipe, RECIPES)
        where = executor(args)
    task = run.Script(
        path="megatron_splitkv.recipes.pretrain",
        args=[args.recipe, *args.overrides],
        entrypoint="python",
        m=True,
    )
    name = f"dflash-{args.recipe.replace('.', '-')}"
    with run.Experiment(name, executor=where) as experiment:
        experiment.add(task, name="pretrain", tail_logs=args.executor == "local")
        if args.dryrun:
            experiment.dryrun()
            return
        experiment.run(detach=args.executor == "slurm")
    if args.executor == "local":  # leaving the block has waited for it
        ended = experiment.status(return_dict=True)["pretrain"]["status"]
        if ended != AppState.SUCCEEDED:
            sys.exit(f"error: the job ended as {ended.name}; its log is above")


if __name__ == "__main__":
    main()
