"""Whether the ranks that share a micro-batch have one plan for it and one way to talk about it.

Ranks with different plans would expect other rows of each other than are sent: a hang, or worse,
numbers that mean nothing; so would ranks that chose another strategy, from other measured links or
another number of ranks a node. A digest of 32 bytes a rank is compared before every micro-batch, by
the host and with gloo, so that no GPU is waited for.
"""

import hashlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron_splitkv.comm import group_size, launch_gather_rows
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan

_SHOWN_RANKS = 8


class PlansDifferError(ConfigError):
    """Ranks that share a micro-batch have different plans for it; other replicas know nothing.

    Args:
        message: the line.
        speaker: whether this rank is the one that prints it, see `launch.exit_on_config_error`.
    """

    def __init__(self, message: str, speaker: bool) -> None:
        super().__init__(message)
        self.speaker = speaker


def host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same ranks whose collectives run on the host.

    Args:
        group: the ranks; every rank of the job calls with its own group.

    Returns:
        `group` itself if it is gloo's already, or has a single rank; a new one otherwise.
    """
    if group is None or group_size(group) == 1 or dist.get_backend(group) == "gloo":
        return group
    # All ranks make all groups: names of groups that only their members make depend on how many
    # groups a rank has, which need not be alike.
    mine = tuple(dist.get_process_group_ranks(group))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in sorted(set(of_ranks))}[
        mine
    ]


def check_same_plan(
    plan: ContextPlan, group: dist.ProcessGroup | None, communication: str = ""
) -> None:
    """Refuse to train when ranks that share a micro-batch have different plans for it.

    Args:
        plan: this rank's plan.
        group: ranks that must agree, see `host_group`.
        communication: how this rank's layers communicate, see `DFlashModel.communication`.

    Raises:
        PlansDifferError: on every rank of the group alike, naming the ranks that differ from most
            others, or from the first rank where no plan has the most.
    """
    if group is None or group_size(group) == 1:
        return
    content = hashlib.sha256(f"{plan.digest}{communication}".encode()).digest()
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)[None]
    gathered = launch_gather_rows(mine, group, label="plan_digest").wait()
    digests = [bytes(row) for row in gathered.tolist()]
    counts = Counter(digests)  # keeps the order of the ranks, and so does most_common
    expected = counts.most_common(1)[0][0]
    if counts[expected] == len(digests):
        return
    ranks = dist.get_process_group_ranks(group)
    differing = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != expected]
    shown = ", ".join(map(str, differing[:_SHOWN_RANKS]))
    if len(differing) > _SHOWN_RANKS:
        shown += f" and {len(differing) - _SHOWN_RANKS} more"
    raise PlansDifferError(
        f"rank{'s' * (len(differing) > 1)} {shown} drew other anchors or another plan, or would "
        f"communicate otherwise, than the rest of the {len(ranks)} ranks that share the "
        "micro-batch; give all ranks the same command line, feature store, links and package "
        "version, and every node equally many ranks",
        speaker=group.rank() == 0,
    )
