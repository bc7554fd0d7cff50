"""What a drafter computes besides attention: floating-point operations of its matrix products."""

from dataclasses import dataclass

from megatron_splitkv.drafter import DFlashConfig

_TRAINED = 3  # forward, and a product each for the input's and the weight's gradient
_ONE_GRADIENT = 2  # features need no gradient; the head is frozen and gets none


@dataclass(frozen=True)
class Dense:
    """Floating-point operations of one rank in one step, forward and backward.

    Args:
        features: fc over the tapped features of its context rows.
        keys: key and value projections of context and own block rows, all layers.
        queries: query projections, all layers.
        outputs: output projections, all layers.
        feed_forward: SwiGLU of its own query rows, all layers.
        head: the target's frozen head over its own query rows.
    """

    features: float
    keys: float
    queries: float
    outputs: float
    feed_forward: float
    head: float

    @property
    def total(self) -> float:
        """All together."""
        return (
            self.features + self.keys + self.queries + self.outputs + self.feed_forward + self.head
        )


def dense_flops(
    drafter: DFlashConfig,
    *,
    context_rows: float,
    key_rows: float,
    own_queries: float,
    projected_queries: float,
    projected_outputs: float,
) -> Dense:
    """Count two operations a multiplication.

    Args:
        drafter: the shapes.
        context_rows: that the rank's fc sees.
        key_rows: whose keys and values the rank projects.
        own_queries: query rows that belong to the rank.
        projected_queries: query rows that the rank projects: its own, or all that it attends where
            hidden rows are gathered.
        projected_outputs: output rows that the rank projects: its own, or all that it attends where
            outputs are scattered behind the projection.
    """
    d, layers = drafter.hidden_size, drafter.num_layers
    query_width = drafter.num_attention_heads * drafter.head_dim
    key_width = 2 * drafter.num_key_value_heads * drafter.head_dim
    trained = 2 * _TRAINED * layers
    return Dense(
        features=2 * _ONE_GRADIENT * context_rows * drafter.feature_width * d,
        keys=trained * key_rows * d * key_width,
        queries=trained * projected_queries * d * query_width,
        outputs=trained * projected_outputs * d * query_width,
        feed_forward=trained * own_queries * 3 * d * drafter.ffn_hidden_size,
        head=2 * _ONE_GRADIENT * own_queries * d * drafter.vocab_size,
    )
