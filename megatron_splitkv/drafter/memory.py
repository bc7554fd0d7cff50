"""Bytes that one drafter layer keeps until backward on one rank: attention, projections and MLP.

The context's rows are few tensors but long; the draft rows have many short ones. What the layers
share (projected context features, rotary table) is not counted, nor are parameters.

Shape legend: R draft rows and K context rows of this rank, A draft rows that it attends.
"""

from megatron_splitkv.attention.memory import AttentionSizes, Tensors, attention_memory


def layer_saved(sizes: AttentionSizes, ffn_size: int, *, fused: bool = True) -> Tensors:
    """What a layer saves, by tensor.

    Args:
        sizes: of its attention.
        ffn_size: inner width of the MLP on this tensor-parallel rank.
        fused: norms and the gated activation are one kernel each, which keep their inputs alone, as
            Transformer Engine's are. Without, they also keep what they computed on the way.
    """
    s = sizes
    own_q = s.options.gather == "q"
    rows_q = s.own if own_q else s.attended
    rows_kv = s.keys + s.own
    elements = {
        "rows between its halves and behind it": 2 * s.own * s.hidden_size,
        "normed rows": 2 * s.own * s.hidden_size,
        "queries before their norm": rows_q * s.query_width,
        "keys and values as projected": 2 * rows_kv * s.key_width,
        "keys": rows_kv * s.key_width,
        "MLP, projected": 2 * s.own * ffn_size,
        "MLP, activated": s.own * ffn_size,
    }
    if own_q and (s.cp_size == 1 or s.options.save == "own"):
        elements["own queries"] = s.own * s.query_width
    if not fused:
        elements |= {
            "rows before the norms' weights": 2 * s.own * s.hidden_size,
            "queries before the norm's weight": rows_q * s.query_width,
            "keys before the norm's weight": rows_kv * s.key_width,
            "MLP, both halves": 2 * s.own * ffn_size,
        }
    statistics = 2 * s.own + rows_q * s.heads + rows_kv * s.kv_heads
    return (
        {f"attention: {name}": size for name, size in attention_memory(s).saved.items()}
        | {name: count * s.itemsize for name, count in elements.items()}
        | {"norms' statistics": statistics * s.sum_itemsize}
    )
