"""From measured collectives to an alpha-beta model: per pattern, and one machine for all of them.

Residuals are relative, so that four kilobytes count as much as sixteen megabytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from megatron_splitkv.comm.links import Links

PATTERNS = ("hop", "all_gather", "all_to_all", "all_reduce")
_LOWEST_LATENCY = 1e-9


@dataclass(frozen=True)
class Sample:
    """One pattern at one size.

    Args:
        pattern: one of `PATTERNS`.
        within: among the ranks of one node; otherwise among all ranks of several nodes.
        ranks: that took part.
        nbytes: as the function of `Links` for the pattern counts them.
        seconds: median over the repeats, of the slowest rank.
        low: least of them.
        high: most of them.
    """

    pattern: str
    within: bool
    ranks: int
    nbytes: int
    seconds: float
    low: float
    high: float

    @property
    def sent(self) -> float:
        """Bytes that one rank sends."""
        share = (self.ranks - 1) / self.ranks
        return self.nbytes * {"hop": 1.0, "all_reduce": 2 * share}.get(self.pattern, share)


@dataclass(frozen=True)
class PatternFit:
    """A straight line through the times of one pattern: latency + sent bytes / bandwidth.

    Args:
        pattern: one of `PATTERNS`.
        within: as `Sample`.
        ranks: as `Sample`.
        latency: seconds.
        bandwidth: bytes/s that a rank sends; inf where size makes no difference.
        error: root mean square of the relative residuals.
    """

    pattern: str
    within: bool
    ranks: int
    latency: float
    bandwidth: float
    error: float


def fit_pattern(samples: Sequence[Sample]) -> PatternFit:
    """Non-negative least squares over the samples of one pattern and scope."""
    measured = np.array([s.seconds for s in samples])
    terms = np.array([[1.0, s.sent] for s in samples]) / measured[:, None]
    scale = terms.max(axis=0)  # a latency and a byte's time lie many powers of ten apart
    (latency, byte_seconds), _ = nnls(terms / scale, np.ones(len(samples)))
    latency, byte_seconds = latency / scale[0], byte_seconds / scale[1]
    residuals = terms @ np.array([latency, byte_seconds]) - 1
    first = samples[0]
    return PatternFit(
        first.pattern,
        first.within,
        first.ranks,
        float(latency),
        float(1 / byte_seconds) if byte_seconds else np.inf,
        float(np.sqrt(np.mean(residuals**2))),
    )


def by_pattern(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of each scope and pattern, as `PATTERNS` has them, the node first."""

    def key(sample: Sample) -> tuple[bool, int]:
        return not sample.within, PATTERNS.index(sample.pattern)

    return [list(group) for _, group in groupby(sorted(samples, key=key), key)]


def predicted_seconds(sample: Sample, links: Links) -> float:
    """What `links` says of a sample."""
    function = {
        "hop": links.ring_hop_seconds,
        "all_gather": links.all_gather_seconds,
        "all_to_all": links.all_to_all_seconds,
        "all_reduce": links.all_reduce_seconds,
    }[sample.pattern]
    return function(sample.nbytes, sample.ranks)


def model_error(samples: Sequence[Sample], links: Links) -> float:
    """Root mean square of the relative differences of `links` from what was measured."""
    return float(
        np.sqrt(np.mean([(predicted_seconds(s, links) / s.seconds - 1) ** 2 for s in samples]))
    )


def fit_links(samples: Sequence[Sample], start: Links) -> Links:
    """The machine that comes closest to all samples together.

    Args:
        samples: of ranks within a node, of ranks of several nodes, or both.
        start: says how many ranks a node has, how fast ranks compute, and what was not measured.

    Returns:
        `start` with the latency and bandwidth of every scope that has samples.
    """
    links = start
    within = [s for s in samples if s.within]
    between = [s for s in samples if not s.within]
    if within:
        links, _ = _fit(within, links, ("intra_latency", "intra_bandwidth"))
    if between:
        # A hop has a card for itself, an exchange shares all of the node's: that tells how many.
        candidates = [
            _fit(between, replace(links, nics_per_node=cards), ("inter_latency", "nic_bandwidth"))
            for cards in range(1, start.ranks_per_node + 1)
        ]
        links, _ = min(candidates, key=lambda candidate: candidate[1])
    return links


def _fit(samples: Sequence[Sample], links: Links, names: tuple[str, str]) -> tuple[Links, float]:
    """Latency and bandwidth of one scope, and what is left of the squares."""

    def machine(logs: NDArray[np.float64]) -> Links:
        values: dict[str, Any] = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return replace(links, **values)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        model = machine(logs)
        return np.array([np.log(predicted_seconds(s, model) / s.seconds) for s in samples])

    lines = [fit_pattern(group) for group in by_pattern(samples)]
    latency = max(_LOWEST_LATENCY, float(np.median([line.latency for line in lines])))
    bandwidths = [line.bandwidth for line in lines if np.isfinite(line.bandwidth)]
    bandwidth = float(np.median(bandwidths)) if bandwidths else getattr(links, names[1])
    found = least_squares(residuals, np.log([latency, bandwidth]), loss="soft_l1", f_scale=0.3)
    return machine(found.x), float(found.cost)
