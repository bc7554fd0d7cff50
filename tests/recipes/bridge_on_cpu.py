"""Megatron-Bridge on a machine without a GPU: what it takes besides `megatron_splitkv.cpu`.

Bridge imports two of NVIDIA's binary packages whether it uses them or not: Transformer Engine, of
which it subclasses and annotates with a few names, and the resiliency extension, of which it
annotates with one. Neither can be had on a CPU-only machine. They are replaced by names without
content, in this process only, after Megatron-Core has found that it has to do without them, and
taken away when Bridge is imported, so that nothing later finds them either.
"""

import importlib
import importlib.machinery
import logging
import sys
from types import ModuleType, SimpleNamespace

import torch

from megatron_splitkv import compat
from megatron_splitkv.cpu import enable_cpu_mode


def import_bridge() -> None:
    """Import Megatron-Bridge, its training loop included, under the CPU mode."""
    enable_cpu_mode()
    importlib.import_module("megatron.core.transformer")
    importlib.import_module("megatron.training.training")
    engine, resiliency = ModuleType("transformer_engine"), ModuleType("nvidia_resiliency_ext")
    pytorch, inprocess = (
        ModuleType("transformer_engine.pytorch"),
        ModuleType("nvidia_resiliency_ext.inprocess"),
    )
    stand_ins = {m.__name__: m for m in (engine, pytorch, resiliency, inprocess)}
    for name, module in stand_ins.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__version__ = "0.0.0"
    pytorch.__getattr__ = _empty_module
    pytorch.ops = SimpleNamespace(Sequential=torch.nn.Sequential)
    engine.pytorch, resiliency.inprocess = pytorch, inprocess
    inprocess.CallWrapper = type("CallWrapper", (), {})
    sys.modules.update(stand_ins)
    logging.getLogger("megatron.bridge").setLevel(logging.WARNING)  # it tells what it lacks
    try:
        importlib.import_module("megatron.bridge.training.pretrain")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def let_bridge_train() -> None:
    """Let its loop start without CUDA, as `enable_cpu_mode` does for Megatron's own."""
    compat.skip_missing_dataset_helpers()
    initialize = importlib.import_module("megatron.bridge.training.initialize")
    setup = importlib.import_module("megatron.bridge.training.setup")
    utils = importlib.import_module("megatron.core.datasets.utils")
    initialize.compile_helpers = utils.compile_helpers
    start = setup.initialize_megatron
    setup.initialize_megatron = lambda **kw: start(allow_no_cuda=True, **kw)
    setup.set_jit_fusion_options = lambda *_: None  # it would compile CUDA kernels


def _empty_module(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (torch.nn.Module,), {})
