"""The few numbers that were fitted, and the machine that the paper describes.

One choice of form saw more than P = 8: a hop's extra cost could also be a share of its link's
speed. Both forms are equal inside one node, where all links are alike; between nodes the share
misses Ring Attention by a factor of two to three. The cost per byte, the gamma of the textbook's
formulas, was kept knowing that.
"""

from dataclasses import dataclass, replace

from megatron_splitkv.comm.links import PRESETS, Links


@dataclass(frozen=True)
class Constants:
    """Fitted to the paper's bars at P = 8, which all run inside one node.

    Args:
        dense_flops: operations/s of a rank in projections, feed-forward and head.
        attention_flops: operations/s of a rank in attention over visible pairs.
        hop_slowdown: how much longer the same pairs take when they are cut into one call a hop
            and merged after each.
        hop_byte_seconds: what every byte of a point-to-point hop costs beside its link: waiting for
            the neighbours, copies, sums in fp32.
    """

    dense_flops: float
    attention_flops: float
    hop_slowdown: float
    hop_byte_seconds: float

    def on(self, links: Links) -> Links:
        """`links` with the fitted speeds of computation in place of its own."""
        return replace(links, dense_flops=self.dense_flops, attention_flops=self.attention_flops)


# "400 Gb/s of inter-node bandwidth" (Section 5.1) may be a node's or an accelerator's.
READINGS: dict[str, Links] = {
    "400 Gb/s a node": PRESETS["nvlink-400g-shared"],
    "400 Gb/s an accelerator": PRESETS["nvlink-400g"],
}

# `splitkv scale --fit` computes them again.
FITTED = Constants(
    dense_flops=153.6e12, attention_flops=111.1e12, hop_slowdown=1.194, hop_byte_seconds=1.988e-11
)
