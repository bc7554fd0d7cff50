"""The methods that are compared: a strategy, its plan, and whose implementation it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """How a step's attention is made parallel.

    Args:
        strategy: of `config.CP_COMM_TYPES`.
        label: what tables and pictures call it.
        plan: how context rows are placed.
        published: volumes as the papers count them; otherwise those that ours move.
        gather: of `splitkv`: ``q`` or ``hidden``.
        scatter: of `splitkv`: ``heads`` or ``proj``.
        group_cast: of `splitkv`: queries go only to ranks with keys of their document.
        redistributes: context rows travel to their ranks once a step; otherwise every rank reads
            them where it needs them.
        bucket: key rows are padded to a multiple.
    """

    strategy: str
    label: str
    plan: str
    published: bool = False
    gather: str = "q"
    scatter: str = "heads"
    group_cast: bool = False
    redistributes: bool = False
    bucket: int = 1


_BUCKET = 4096  # Section 4.3


def _ours(gather: str, scatter: str, group_cast: bool) -> Method:
    cast = ", group" if group_cast else ""
    plan = "balanced-local" if group_cast else "balanced"
    label = f"{gather}+{scatter}{cast}"
    return Method("splitkv", label, plan, False, gather, scatter, group_cast)


# Of the paper, each with the placement that it has there (Section 5.1).
PAPER_METHODS: dict[str, Method] = {
    "splitkv": Method(
        "splitkv",
        "Split-KV (paper)",
        "lpt",
        published=True,
        scatter="proj",
        redistributes=True,
        bucket=_BUCKET,
    ),
    "a2a": Method("a2a", "Ulysses", "none", published=True, bucket=_BUCKET),
    "p2p": Method("p2p", "Ring Attention", "zigzag", published=True, bucket=_BUCKET),
    "ringx": Method("ringx", "RingX", "none", published=True, bucket=_BUCKET),
    "lv_xattn": Method("lv_xattn", "LV-XAttn", "none", published=True, bucket=_BUCKET),
}
_PLACES = [(gather, scatter) for gather in ("q", "hidden") for scatter in ("heads", "proj")]
# What this package adds: predictions, there is nothing of the paper to hold them to. Its scatters
# are all-to-alls, inside nodes and then between them; those of a group-cast take one level.
OUR_METHODS: dict[str, Method] = {
    **{f"splitkv-{g}-{s}": _ours(g, s, False) for g, s in _PLACES},
    **{f"splitkv-{g}-{s}-group": _ours(g, s, True) for g, s in _PLACES},
}
METHODS: dict[str, Method] = {
    **PAPER_METHODS,
    "all_gather": Method("all_gather", "All-gather K/V", "none"),
    **OUR_METHODS,
}
