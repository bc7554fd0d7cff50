"""Training at twelve layouts and more is the training of one process: losses, norms, parameters."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from tests.distributed.layouts import (
    CLIP,
    LAYOUTS,
    Difference,
    Layout,
    Run,
    compare,
    difference,
    run_layouts,
    table,
    train,
)
from tests.drafter.harness import on_ranks

# Ranks that import Megatron on a busy machine take their time.

TOLERANCE = 1e-5
# Rounding a parameter to bf16 alone changes it by up to 2^-8 = 4e-3 of itself.
BF16_TOLERANCE = Difference(loss=1e-3, norm=1e-2, parameters=2e-2)


@pytest.fixture(scope="module")
def differences() -> dict[str, Difference]:
    found = compare()
    print(f"\n{table(found)}")
    return {str(layout): distance for layout, distance in found}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_changes_nothing(layout: Layout, differences: dict[str, Difference]) -> None:
    found = differences[str(layout)]
    if layout.bf16:
        assert found.loss < BF16_TOLERANCE.loss
        assert found.norm < BF16_TOLERANCE.norm
        assert found.parameters < BF16_TOLERANCE.parameters
    else:
        assert found.worst < TOLERANCE


def clip_by_own_norm(layout: Layout) -> dict[str, torch.Tensor]:
    """The wrong clip: every rank by the norm of its own share of the gradients."""

    def norm_of_own(gradients: Sequence[torch.Tensor], **_: object) -> float:
        return float(torch.cat([g.flatten() for g in gradients]).norm())

    with mock.patch("megatron.core.optimizer.optimizer.get_grad_norm_fp32", norm_of_own):
        return train(layout).parameters


def test_the_comparison_sees_a_wrong_clip() -> None:
    layout = Layout(8, cp=2, distributed=True)
    (right,) = run_layouts([layout])
    assert min(right.norms) > CLIP
    wrong = Run(right.losses, right.norms, on_ranks(8, clip_by_own_norm, layout)[0])
    assert difference(wrong, right).parameters > 100 * TOLERANCE
