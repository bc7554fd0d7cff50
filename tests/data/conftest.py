"""An untrained tiny target as a Hugging Face folder, once a session."""

from pathlib import Path

import pytest
import torch

from megatron_splitkv.data.tiny_target import (
    TinyTargetConfig,
    build_tiny_target,
    save_tiny_target,
)

# The models are tiny: threads cost more than they bring, and much more on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = build_tiny_target(TinyTargetConfig(hidden_size=32, seed=1))
    for parameter in model.parameters():
        if parameter.dim() > 1:  # Large enough that greedy choices are no near-ties.
            parameter.data.mul_(8)
    save_tiny_target(model, folder)
    return folder
