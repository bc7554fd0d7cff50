"""Past the paper: longer contexts and more ranks than anybody measured, and what wins where."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_splitkv.comm.links import Links
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale.constants import Constants
from megatron_splitkv.scale.methods import METHODS, Method
from megatron_splitkv.scale.step import step_seconds, supports
from megatron_splitkv.scale.workload import K, Workload

CONTEXTS = (256 * K, *(m * K * K for m in (1, 4, 16, 64)))  # the first: where queries are many
CP_SIZES = tuple(2**n for n in range(3, 13))
SAMPLES, SAMPLE_QUERIES = 8, 8 * K
MEMORY_LIMIT = 80 * 1e9  # bytes of an accelerator


@dataclass(frozen=True)
class Cell:
    """Every method at one context and rank count.

    Args:
        context_rows: S.
        cp_size: P.
        seconds: by method; those that cannot run are absent.
    """

    context_rows: int
    cp_size: int
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The quickest method of all, by its key in `METHODS`."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def best_of(self, own: bool) -> str:
        """The quickest variant of Split-KV, or (not `own`) of the others that run here."""
        names = [m for m in self.seconds if (METHODS[m].strategy == "splitkv") == own]
        return min(names, key=self.seconds.__getitem__)


def rows_text(rows: int) -> str:
    """Context rows as people write them: 256k, 16M."""
    return f"{rows >> 20}M" if rows >= K * K else f"{rows >> 10}k"


def key_bytes(method: Method, workload: Workload, drafter: DFlashConfig) -> float:
    """Bytes of keys, values and their gradients of one layer that a rank holds at once, in bf16."""
    rows = workload.context_rows + workload.query_rows
    heads: float = drafter.num_key_value_heads
    if method.strategy == "a2a":
        heads = max(1.0, heads / workload.cp_size)
    elif method.strategy != "all_gather":
        rows //= workload.cp_size
    return 2 * 2 * 2 * rows * heads * drafter.head_dim


def explore(
    drafter: DFlashConfig,
    links: Links,
    constants: Constants,
    contexts: tuple[int, ...] = CONTEXTS,
    cp_sizes: tuple[int, ...] = CP_SIZES,
) -> Iterator[Cell]:
    """Time every method at every context and rank count; b = 8 samples, Q = 64k.

    Args:
        drafter: shapes.
        links: the machine, its speeds of computation included.
        constants: the fitted ones.
        contexts: packed rows.
        cp_sizes: ranks.
    """
    for context in contexts:
        for ranks in cp_sizes:
            workload = Workload(SAMPLES, context // SAMPLES, SAMPLE_QUERIES, ranks)
            yield Cell(
                context,
                ranks,
                {
                    name: step_seconds(method, workload, drafter, links, constants).total
                    for name, method in METHODS.items()
                    if supports(method, drafter, ranks)
                    and key_bytes(method, workload, drafter) <= MEMORY_LIMIT
                },
            )
