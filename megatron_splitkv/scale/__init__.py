"""The cluster on paper: a model of a drafter's training step, held to the paper's bars.

Everything is arithmetic on one CPU: attention work from the real planner, volumes from
`attention.strategies`, links from `comm.links`, four constants fitted at P = 8.
"""

from megatron_splitkv.scale.calibration import fit
from megatron_splitkv.scale.constants import FITTED, READINGS, Constants
from megatron_splitkv.scale.methods import METHODS, Method
from megatron_splitkv.scale.paper import MODELS, SETTINGS
from megatron_splitkv.scale.step import StepTime, step_seconds
from megatron_splitkv.scale.study import BEYOND, Machine, paper_machines, study_machine, to_json
from megatron_splitkv.scale.workload import Workload, ratio, strong, weak

__all__ = [
    "BEYOND",
    "FITTED",
    "METHODS",
    "MODELS",
    "READINGS",
    "SETTINGS",
    "Constants",
    "Machine",
    "Method",
    "StepTime",
    "Workload",
    "fit",
    "paper_machines",
    "ratio",
    "step_seconds",
    "strong",
    "study_machine",
    "to_json",
    "weak",
]
