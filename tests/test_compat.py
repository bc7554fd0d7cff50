"""Versions and signatures of Megatron-core: the known ones pass, others are named."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv import compat
from megatron_splitkv.compat import distributed_optimizer, environment
from megatron_splitkv.config import ConfigError


@pytest.mark.parametrize("version", ["0.18.2", "0.18.3rc1", "0.19.2", "0.19.2+abc", "0.19.9"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(environment, "megatron_core_version", lambda: version)
    compat.check_environment()


@pytest.mark.parametrize("version", ["0.16.1", "0.18.1", "0.20.0", "0.20rc0", "1.0", "nonsense"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(environment, "megatron_core_version", lambda: version)
    with pytest.raises(ConfigError, match=rf"{version} is not supported.*>= 0\.18\.2, < 0\.20"):
        compat.check_environment()


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "megatron_core_version", lambda: None)
    with pytest.raises(ConfigError, match="megatron-core is not installed"):
        compat.check_environment()


@pytest.mark.parametrize("missing", ["psutil", "megatron.training"])
def test_missing_companions_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(ConfigError, match=missing):
        compat.check_environment()


def test_the_installed_megatron_is_supported() -> None:
    compat.check_environment()


def test_dataset_helpers_are_compiled_only_where_a_makefile_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    utils = importlib.import_module("megatron.core.datasets.utils")
    original = utils.compile_helpers
    monkeypatch.setattr(utils, "compile_helpers", original)
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    assert compat.skip_missing_dataset_helpers()
    assert utils.compile_helpers is not original
    utils.compile_helpers()  # does not end the process

    monkeypatch.setattr(utils, "compile_helpers", original)
    (tmp_path / "Makefile").touch()
    assert not compat.skip_missing_dataset_helpers()
    assert utils.compile_helpers is original


def _pretrain_0_18(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
) -> None:
    _calls.append(locals())


def _pretrain_0_19(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    process_non_loss_data_func: Any = None,
) -> None:
    _calls.append(locals())


def _pretrain_unknown(cfg_container: Any, builder: Any) -> None:
    raise AssertionError("must not be called")


_calls: list[dict[str, Any]] = []


def _datasets(num_samples: Any) -> None: ...


def _model() -> None: ...


def _step(data_iterator: Any, model: Any) -> None: ...


def _run(monkeypatch: pytest.MonkeyPatch, pretrain: Callable[..., None]) -> None:
    training = importlib.import_module("megatron.training.training")
    argument_utils = importlib.import_module("megatron.training.argument_utils")
    monkeypatch.setattr(training, "pretrain", pretrain)
    monkeypatch.setattr(
        argument_utils, "pretrain_cfg_container_from_args", lambda args, model: ("container", model)
    )
    _calls.clear()
    compat.run_pretrain(
        None,  # type: ignore[arg-type]
        datasets_provider=_datasets,
        model_provider=_model,
        forward_step=_step,
    )


@pytest.mark.parametrize("pretrain", [_pretrain_0_18, _pretrain_0_19])
def test_pretrain_is_called_right_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, pretrain: Callable[..., None]
) -> None:
    """The model provider arrives as such, and no model configuration silently replaces it."""
    _run(monkeypatch, pretrain)
    (call,) = _calls
    assert call["cfg_container"] == ("container", None)
    assert call["train_valid_test_dataset_provider"] is _datasets
    assert call["model_provider"] is _model
    assert call["forward_step_func"] is _step


def test_an_unknown_pretrain_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"_pretrain_unknown.*lacks.*model_provider.*builder"):
        _run(monkeypatch, _pretrain_unknown)


@pytest.mark.parametrize("has_fused_adam", [False, True])
def test_the_distributed_optimizer_is_mended_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, has_fused_adam: bool
) -> None:
    """What each mend does is tested on ranks, in `distributed/test_layouts_checkpoint.py`."""
    optimizers = importlib.import_module("megatron.core.optimizer")
    upstream = importlib.import_module(
        "megatron.core.optimizer.distrib_optimizer"
    ).DistributedOptimizer
    monkeypatch.setattr(optimizers, "DistributedOptimizer", upstream)
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", not has_fused_adam)
    compat.mend_distributed_optimizer()
    mended = optimizers.DistributedOptimizer
    assert issubclass(mended, upstream)
    assert "sharded_param_state_fully_reshardable" in vars(mended) or not has_fused_adam
    assert (mended.load_state_dict is upstream.load_state_dict) == has_fused_adam
    compat.mend_distributed_optimizer()
    assert optimizers.DistributedOptimizer is mended


def test_a_release_without_the_fault_of_padded_buckets_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizers = importlib.import_module("megatron.core.optimizer")
    upstream = importlib.import_module(
        "megatron.core.optimizer.distrib_optimizer"
    ).DistributedOptimizer
    monkeypatch.setattr(optimizers, "DistributedOptimizer", upstream)
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distributed_optimizer.inspect, "getsource", lambda _: "return state")
    distributed_optimizer._mended.cache_clear()
    compat.mend_distributed_optimizer()
    distributed_optimizer._mended.cache_clear()
    assert optimizers.DistributedOptimizer is upstream
