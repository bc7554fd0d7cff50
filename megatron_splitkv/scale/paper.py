"""The paper's bars, in seconds a step: what the model is calibrated on and what it is held to.

Figures 6 to 8 arrive as broken text. A bar is printed with its time and its efficiency, and the
text repeats ratios; every time below agrees with each of these that is printed beside it
(`tests/scale/test_paper.py` computes them again). Two bars of Figure 8 for the 27B drafter,
Split-KV at 1:8 and 1:16, rest on single digits that were left over.
"""

from dataclasses import dataclass

from megatron_splitkv.scale.workload import Workload, ratio, strong, weak

MODELS = ("qwen3.5-35b-a3b", "qwen3.5-27b")
SETTINGS = ("weak", "strong", "ratio")
METHODS = ("splitkv", "a2a", "p2p", "ringx", "lv_xattn")
CALIBRATION_RANKS = 8

CP_SIZES = (8, 16, 32, 64)
RATIOS = (4, 8, 16, 32)  # S / Q
_POINTS = {"weak": CP_SIZES, "strong": CP_SIZES, "ratio": RATIOS}

# By setting, model and method; over CP sizes or ratios. Three values: not supported at P = 64.
SECONDS: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "weak": {  # Figure 6
        "qwen3.5-35b-a3b": {
            "splitkv": (3.67, 3.95, 3.92, 4.02),
            "a2a": (3.69, 5.08, 6.77),
            "p2p": (5.72, 13.19, 22.84, 41.31),
            "ringx": (18.04, 31.62, 38.59, 45.10),
            "lv_xattn": (4.65, 8.44, 9.56, 11.31),
        },
        "qwen3.5-27b": {
            "splitkv": (3.33, 3.90, 3.86, 3.94),
            "a2a": (3.19, 3.90, 4.89),
            "p2p": (7.08, 18.34, 32.29, 66.64),
            "ringx": (13.87, 20.99, 25.29, 29.44),
            "lv_xattn": (3.93, 6.13, 6.91, 8.61),
        },
    },
    "strong": {  # Figure 7
        "qwen3.5-35b-a3b": {
            "splitkv": (3.46, 2.00, 1.16, 0.78),
            "a2a": (3.59, 2.70, 1.98),
            "p2p": (6.36, 6.50, 5.48, 5.26),
            "ringx": (15.95, 10.07, 6.32, 5.21),
            "lv_xattn": (5.99, 4.65, 3.34, 2.86),
        },
        "qwen3.5-27b": {
            "splitkv": (2.98, 2.00, 1.24, 0.87),
            "a2a": (2.89, 2.09, 1.54),
            "p2p": (5.24, 7.52, 7.03, 6.85),
            "ringx": (10.88, 6.83, 4.38, 3.86),
            "lv_xattn": (4.55, 3.38, 2.48, 2.22),
        },
    },
    "ratio": {  # Figure 8
        "qwen3.5-35b-a3b": {
            "splitkv": (1.32, 1.26, 1.33, 1.47),
            "a2a": (1.33, 1.56, 2.02, 2.90),
            "p2p": (1.94, 3.41, 5.88, 10.92),
            "ringx": (3.80, 6.23, 10.40, 16.54),
            "lv_xattn": (4.01, 4.38, 4.57, 4.71),
        },
        "qwen3.5-27b": {
            "splitkv": (1.22, 1.26, 1.43, 1.76),
            "a2a": (1.11, 1.29, 1.62, 2.27),
            "p2p": (2.19, 3.83, 7.19, 13.85),
            "ringx": (2.70, 4.25, 6.99, 11.04),
            "lv_xattn": (2.86, 3.10, 3.30, 3.48),
        },
    },
}


@dataclass(frozen=True)
class Bar:
    """One measured time of the paper.

    Args:
        setting: one of `SETTINGS`.
        model: one of `MODELS`.
        method: one of `METHODS`.
        x: CP size, or S / Q in the ablation.
        seconds: of a training step.
    """

    setting: str
    model: str
    method: str
    x: int
    seconds: float

    @property
    def workload(self) -> Workload:
        """What was trained."""
        return workload_of(self.setting, self.x)

    @property
    def calibrates(self) -> bool:
        """Whether the constants may see it: one node only."""
        return self.workload.cp_size == CALIBRATION_RANKS


def workload_of(setting: str, x: int) -> Workload:
    """The workload of a setting at a CP size, or at a ratio S / Q."""
    return {"weak": weak, "strong": strong, "ratio": ratio}[setting](x)


def points_of(setting: str) -> tuple[int, ...]:
    """CP sizes, or ratios S / Q, at which the paper measured."""
    return _POINTS[setting]


def all_bars() -> list[Bar]:
    """Every bar of Figures 6 to 8."""
    return [
        Bar(setting, model, method, x, seconds)
        for setting, models in SECONDS.items()
        for model, methods in models.items()
        for method, times in methods.items()
        for x, seconds in zip(_POINTS[setting], times, strict=False)
    ]
