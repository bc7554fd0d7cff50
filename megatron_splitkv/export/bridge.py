"""The drafter's registration with Megatron-Bridge's HuggingFace side.

`export.zlab` converts whole tensors on one machine without Bridge. This file lets people who stay
inside Bridge load a public drafter into a model that is spread over tensor-parallel ranks, and
stream one out of it. Importing it registers; nothing else of the package imports it.

`AutoBridge` accepts architectures by the ends of their names and a drafter's is not among them:
use the class::

    source = DrafterFolder("drafter")
    DFlashBridge().load_weights_hf_to_megatron(source, model)
    for name, tensor in DFlashBridge().stream_weights_megatron_to_hf(model, source): ...
"""

import os
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    KVMapping,
)
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource, StateDict
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashModel
from megatron_splitkv.export.config_json import ARCHITECTURE, from_config_json, to_config_json
from megatron_splitkv.export.folder import read_config, read_values
from megatron_splitkv.export.zlab import (
    GATE_UP,
    KEY_VALUE,
    LAYER_NAMES,
    LINEAR_FC1,
    LINEAR_KV,
    MODEL_NAMES,
)


class DrafterFolder:
    """A drafter in the public layout, as Bridge reads pretrained models.

    Args:
        folder: with ``config.json`` and safetensors files.

    Raises:
        ConfigError: no such folder, of a drafter that is not supported, or of one that is not
            DFlash's: the heads of the others are split over tensor-parallel ranks in a way that
            Bridge does not know.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.model_name_or_path = os.fspath(folder)
        self.dflash = read_config(folder)
        if self.dflash.kind != "dflash":
            raise ConfigError(
                f"drafter {folder} is of kind {self.dflash.kind}, Bridge converts dflash only; "
                "train from it with --initial-drafter, convert with `splitkv export`"
            )
        self.config = PretrainedConfig(**read_values(folder))
        self.state = StateDict(SafeTensorsStateSource(self.model_name_or_path))


@MegatronModelBridge.register_bridge(source=ARCHITECTURE, target=DFlashModel, model_type="qwen3")
class DFlashBridge(MegatronModelBridge):
    """Names and layouts of a drafter's tensors, the same as `export.zlab`'s."""

    def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
        """Megatron's configuration of a public drafter: Bridge's hook.

        Args:
            hf_pretrained: a `DrafterFolder`, or another holder of a ``config``.

        Raises:
            ConfigError: of a drafter that is not supported.
        """
        return from_config_json(hf_pretrained.config.to_dict()).to_transformer_config()

    @classmethod
    def megatron_to_hf_config(cls, provider: Any) -> dict[str, Any]:
        """The public ``config.json`` of a model: Bridge's hook.

        Args:
            provider: a `recipes.model.DFlashModelConfig`.
        """
        return to_config_json(provider.dflash, provider.params_dtype)

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Which tensor is which; ``*`` stands for a layer's number."""
        layer, public = "decoder.layers.*.", "layers.*."
        key, value = KEY_VALUE
        gate, up = GATE_UP
        names = dict(MODEL_NAMES)
        # A class of our own, which Bridge cannot place by its name.
        features = ColumnParallelMapping("fc.weight", names.pop("fc.weight"))
        return MegatronMappingRegistry(
            features,
            *(AutoMapping(ours, theirs) for ours, theirs in names.items()),
            *(AutoMapping(layer + ours, public + theirs) for ours, theirs in LAYER_NAMES.items()),
            KVMapping(layer + LINEAR_KV, k=public + key, v=public + value),
            GatedMLPMapping(layer + LINEAR_FC1, gate=public + gate, up=public + up),
        )
