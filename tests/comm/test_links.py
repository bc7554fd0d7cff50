"""The alpha-beta model: times by hand, the two levels, files, bad input."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_splitkv.comm.links import PRESETS, Links, links_from
from megatron_splitkv.config import ConfigError

# 4 ranks a node; 100 bytes/s inside, one card of 40 bytes/s a node; latencies 1 s and 10 s.
TOY = Links("toy", 1.0, 100.0, 10.0, 40.0, 1, 4, 1.0, 1.0)


def test_inside_one_node() -> None:
    """4 ranks of one node: three steps of latency, and 3/4 of 400 bytes at 100 bytes/s."""
    assert TOY.all_gather_seconds(400, 4) == 3 + 300 / 100
    assert TOY.reduce_scatter_seconds(400, 4) == 6
    assert TOY.all_to_all_seconds(400, 4) == 3 + 300 / 100
    assert TOY.broadcast_seconds(400, 4) == 3 + 400 / 100
    assert TOY.ring_hop_seconds(400, 4) == 1 + 400 / 100
    # A ring takes 2 x 6 s, a tree 2 x (2 hops + 4 s): they tie.
    assert TOY.all_reduce_seconds(400, 4) == 12
    assert TOY.all_reduce_seconds(4, 4) == 2 * (2 + 0.04)  # the tree, for little


def test_across_two_nodes() -> None:
    """8 ranks on two nodes: 6 hops inside and 1 between; the ring runs at the card's speed."""
    assert TOY.all_gather_seconds(800, 8) == 6 * 1 + 1 * 10 + 700 / 40
    # Each rank sends 400 of its 800 bytes to the other node, through a quarter of the card.
    assert TOY.all_to_all_seconds(800, 8) == 3 * 1 + 4 * 10 + 400 / 10
    # One rank of a node crosses: it has the card for itself.
    assert TOY.ring_hop_seconds(80, 8) == 10 + 80 / 40
    assert TOY.broadcast_seconds(80, 8) == 16 + 80 / 40
    assert TOY.all_reduce_seconds(1, 8) == 2 * (2 * 1 + 1 * 10 + 1 / 40)


def test_more_cards_help_collectives_but_not_one_stream() -> None:
    more = replace(TOY, nics_per_node=2)
    assert more.all_gather_seconds(800, 8) == 16 + 700 / 80
    assert more.all_to_all_seconds(800, 8) == 43 + 400 / 20
    assert more.ring_hop_seconds(80, 8) == TOY.ring_hop_seconds(80, 8)
    # Enough cards, and the links inside the node are the slowest.
    assert replace(TOY, nics_per_node=4).all_gather_seconds(800, 8) == 16 + 700 / 100


def test_uneven_exchange_takes_the_slower_level() -> None:
    assert TOY.all_to_all_v_seconds(1000, 0, 8) == 43 + 1000 / 100
    assert TOY.all_to_all_v_seconds(1000, 200, 8) == 43 + 200 / 10


def test_one_rank_pays_nothing() -> None:
    for seconds in (
        TOY.all_gather_seconds,
        TOY.reduce_scatter_seconds,
        TOY.all_to_all_seconds,
        TOY.all_reduce_seconds,
        TOY.broadcast_seconds,
        TOY.ring_hop_seconds,
    ):
        assert seconds(1e9, 1) == 0


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64])
def test_nothing_is_quicker_than_its_bytes(name: str, ranks: int) -> None:
    """What one rank sends leaves it at the speed of its fastest link at best."""
    links, nbytes = PRESETS[name], 1e9
    fastest = max(links.intra_bandwidth, links.node_bandwidth)
    share = (ranks - 1) / ranks
    assert links.all_gather_seconds(nbytes, ranks) >= nbytes * share / fastest
    assert links.all_to_all_seconds(nbytes, ranks) >= nbytes * share / fastest
    assert links.all_reduce_seconds(nbytes, ranks) >= 2 * nbytes * share / fastest
    assert links.broadcast_seconds(nbytes, ranks) >= nbytes / fastest
    assert links.ring_hop_seconds(nbytes, ranks) >= nbytes / fastest


def test_the_readings_of_400_gbits_differ_between_nodes_only() -> None:
    each, shared = PRESETS["nvlink-400g"], PRESETS["nvlink-400g-shared"]
    assert each.inter_bandwidth == 50e9
    assert shared.inter_bandwidth == 50e9 / 8
    assert each.all_to_all_seconds(1e9, 8) == shared.all_to_all_seconds(1e9, 8)
    assert each.all_to_all_seconds(1e9, 16) < shared.all_to_all_seconds(1e9, 16)


def test_file_round_trip_and_names(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    TOY.save(file)
    assert Links.load(file) == TOY
    assert links_from(str(file)) == TOY
    assert links_from("loopback") is PRESETS["loopback"]
    assert [f.name for f in tmp_path.iterdir()] == ["links.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "links.json"
    TOY.save(file)

    def full(self: Path, text: str) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        replace(TOY, name="new").save(file)
    assert Links.load(file) == TOY
    assert len(list(tmp_path.iterdir())) == 1


def _with(**changes: object) -> str:
    return json.dumps({**json.loads(TOY.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"name": "x"}', "lacks 'attention_flops'"),
        (_with(speed=1), "does not know 'speed'"),
        (_with(ranks_per_node=0), "ranks_per_node 0 must be finite and more than zero"),
        (_with(ranks_per_node=1.5), "ranks_per_node 1.5 must be a whole number"),
        (_with(intra_latency=-1), "intra_latency -1 must be finite and zero or more"),
        (_with(nic_bandwidth=math.inf), "nic_bandwidth inf must be finite"),
        (_with(nic_bandwidth="fast"), "nic_bandwidth 'fast' must be a number"),
        (_with(nics_per_node=True), "nics_per_node True must be a whole number"),
        (_with(name=""), "name ''"),
        ("[" * 100_000, "not JSON"),
        (_with(ranks_per_node=10**400), "ranks_per_node must be at most"),
        (_with(nic_bandwidth=10**400), "nic_bandwidth must be at most"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        Links.load(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_and_unknown(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary"):
        links_from(str(tmp_path / "binary"))
    with pytest.raises(ConfigError, match="neither a file nor one of: nvlink-400g"):
        links_from("infiniband")
