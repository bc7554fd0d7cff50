"""The recovered bars agree with everything else that the paper prints about them."""

import pytest

from megatron_splitkv.scale.paper import SECONDS, all_bars

A3B, DENSE = "qwen3.5-35b-a3b", "qwen3.5-27b"
# Efficiencies printed on the bars at P = 16, 32, 64, in percent.
WEAK = {
    (A3B, "splitkv"): (93, 94, 91),
    (A3B, "a2a"): (73, 55),
    (A3B, "p2p"): (43, 25, 14),
    (A3B, "ringx"): (57, 47, 40),
    (A3B, "lv_xattn"): (55, 49, 41),
    (DENSE, "splitkv"): (85, 86, 85),
    (DENSE, "a2a"): (82, 65),
    (DENSE, "p2p"): (39, 22, 11),
    (DENSE, "ringx"): (66, 55, 47),
    (DENSE, "lv_xattn"): (64, 57, 46),
}
STRONG = {
    (A3B, "splitkv"): (87, 75, 55),
    (A3B, "a2a"): (66, 45),
    (A3B, "p2p"): (49, 29, 15),
    (A3B, "ringx"): (79, 63, 38),
    (A3B, "lv_xattn"): (64, 45, 26),
    (DENSE, "splitkv"): (75, 60, 43),
    (DENSE, "a2a"): (69, 47),
    (DENSE, "p2p"): (35, 19, 10),
    (DENSE, "ringx"): (80, 62, 35),
    (DENSE, "lv_xattn"): (67, 46, 26),
}
# Growth from Q:S 1:4 to 1:32 (Section 5.4).
GROWTH = {
    (A3B, "splitkv"): 1.11,
    (A3B, "a2a"): 2.18,
    (A3B, "p2p"): 5.63,
    (A3B, "ringx"): 4.35,
    (A3B, "lv_xattn"): 1.17,
    (DENSE, "splitkv"): 1.44,
    (DENSE, "a2a"): 2.05,
    (DENSE, "p2p"): 6.32,
    (DENSE, "ringx"): 4.09,
    (DENSE, "lv_xattn"): 1.22,
}
ROUNDED = 0.006  # what two decimals of a time leave open, on ratios around one


@pytest.mark.parametrize(("setting", "printed"), [("weak", WEAK), ("strong", STRONG)])
def test_efficiencies(setting: str, printed: dict[tuple[str, str], tuple[int, ...]]) -> None:
    for (model, method), percents in printed.items():
        times = SECONDS[setting][model][method]
        assert len(times) == len(percents) + 1
        for n, percent in enumerate(percents, start=1):
            speed_up = 2**n if setting == "strong" else 1
            efficiency = times[0] / times[n] / speed_up
            assert efficiency == pytest.approx(percent / 100, abs=0.008), (model, method, n)


def test_growth_over_the_ratio() -> None:
    for (model, method), growth in GROWTH.items():
        times = SECONDS["ratio"][model][method]
        assert times[-1] / times[0] == pytest.approx(growth, rel=ROUNDED), (model, method)
        assert list(times) == sorted(times) or method == "splitkv"


def test_ratios_in_the_text() -> None:
    def ratio(setting: str, model: str, at: int, method: str) -> float:
        times = SECONDS[setting][model]
        return times[method][at] / times["splitkv"][at]

    assert ratio("weak", A3B, 3, "lv_xattn") == pytest.approx(2.81, abs=0.006)
    assert ratio("weak", DENSE, 3, "lv_xattn") == pytest.approx(2.19, abs=0.006)
    assert ratio("strong", A3B, 3, "lv_xattn") == pytest.approx(3.67, abs=0.006)
    assert ratio("strong", DENSE, 3, "lv_xattn") == pytest.approx(2.55, abs=0.006)
    assert ratio("ratio", A3B, 0, "a2a") == pytest.approx(1.01, abs=0.006)
    assert ratio("ratio", A3B, 3, "a2a") == pytest.approx(1.97, abs=0.006)
    assert ratio("ratio", DENSE, 3, "a2a") == pytest.approx(1.29, abs=0.006)
    assert 1 / ratio("ratio", DENSE, 0, "a2a") == pytest.approx(1.10, abs=0.006)
    assert ratio("ratio", DENSE, 1, "a2a") > 1  # "overtakes it at 1:8"
    lv = [ratio("ratio", m, n, "lv_xattn") for m in (A3B, DENSE) for n in range(4)]
    assert min(lv) == pytest.approx(1.98, abs=0.01)
    assert max(lv) == pytest.approx(3.48, abs=0.01)


def test_split_kv_is_lowest_as_often_as_the_text_says() -> None:
    """Weak: six of eight lowest, a seventh tied; strong: seven of eight."""
    strictly = {"weak": 0, "strong": 0}
    tied = dict(strictly)
    for setting in strictly:
        for times in SECONDS[setting].values():
            for n, own in enumerate(times["splitkv"]):
                others = min(t[n] for m, t in times.items() if m != "splitkv" and n < len(t))
                strictly[setting] += own < others
                tied[setting] += own == others
    assert strictly == {"weak": 6, "strong": 7}
    assert tied == {"weak": 1, "strong": 0}


def test_twenty_bars_calibrate_and_ninety_six_are_held_out() -> None:
    bars = all_bars()
    assert sum(bar.calibrates for bar in bars) == 20
    assert sum(not bar.calibrates for bar in bars) == 96
    assert {bar.x for bar in bars if bar.calibrates} == {8}
    assert all(bar.setting != "ratio" for bar in bars if bar.calibrates)


def test_workloads_have_the_packed_sizes_of_the_text() -> None:
    sizes = {
        (bar.setting, bar.x): (bar.workload.context_rows >> 10, bar.workload.query_rows >> 10)
        for bar in all_bars()
    }
    assert [sizes["weak", p] for p in (8, 64)] == [(1024, 64), (8192, 64)]
    assert [sizes["strong", p] for p in (8, 64)] == [(1024, 32), (1024, 32)]
    assert [sizes["ratio", r] for r in (4, 8, 16, 32)] == [
        (256, 64),
        (512, 64),
        (1024, 64),
        (2048, 64),
    ]
