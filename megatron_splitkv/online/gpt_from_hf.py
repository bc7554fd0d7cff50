"""Megatron's GPT from a local Hugging Face folder: configuration, modules, weights.

Dense decoders of the llama, qwen2 and qwen3 families, without an output layer: a target in the
training job is asked for hidden states only.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_splitkv import compat
from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.rope import rope_types
from megatron_splitkv.data.target import import_transformers
from megatron_splitkv.gpt_specs import get_gpt_layer_spec
from megatron_splitkv.online.hf_weights import HFWeights

FAMILIES = ("llama", "qwen2", "qwen3")
BACKENDS = ("local", "transformer_engine")
# Frequencies that do not depend on how long a sequence is, and leave cosines and sines their size.
_ROPE_TYPES = {"default", "linear", "llama3"}


def check_gpt_from_hf(
    folder: str | os.PathLike[str], *, backend: str = "local", tp_size: int = 1
) -> None:
    """Refuse, by its config.json, a target that `build_gpt_from_hf` would not build.

    Args:
        folder: of the target.
        backend: see `build_gpt_from_hf`.
        tp_size: tensor-parallel ranks.

    Raises:
        ConfigError: naming what is not supported.
    """
    require_choice("--transformer-impl", backend, BACKENDS)
    if backend == "transformer_engine" and not compat.has_transformer_engine():
        raise ConfigError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install "
            "it or use --transformer-impl local"
        )
    _read_config(folder, tp_size)


def build_gpt_from_hf(
    folder: str | os.PathLike[str],
    *,
    pg_collection: ProcessGroupCollection,
    backend: str = "local",
    dtype: torch.dtype | None = None,
) -> GPTModel:
    """Build this rank's part of a target and read its weights.

    It runs packed documents (``qkv_format="thd"``) in Megatron's zigzag order over the
    context-parallel ranks. Nothing is drawn, so no random state changes.

    Args:
        folder: of the target, with config.json and safetensors.
        pg_collection: process groups; tp and cp split the target, pp must be of one rank.
        backend: ``local``, Megatron's own modules with split-KV attention, which run anywhere, or
            ``transformer_engine``, its modules with its own context parallelism.
        dtype: of the weights; as saved when None.

    Returns:
        The GPT in eval mode, frozen, on this process's device.

    Raises:
        ConfigError: see `check_gpt_from_hf`; weights that are missing or are not of the shape that
            config.json says.
    """
    tp_rank, tp_size = group_rank(pg_collection.tp), group_size(pg_collection.tp)
    check_gpt_from_hf(folder, backend=backend, tp_size=tp_size)
    hf = _read_config(folder, tp_size)
    weights = HFWeights(folder)
    on_gpu, fused_norms = torch.cuda.is_available(), backend == "transformer_engine"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = dtype or getattr(hf, "dtype", None) or weights.dtype()
    cp_size = group_size(pg_collection.cp)
    config = TransformerConfig(
        **_architecture(hf),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp_size,
        context_parallel_size=cp_size,
        cp_comm_type="p2p" if fused_norms else "splitkv",
        apply_rope_fusion=fused_norms,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
    )
    model = GPTModel(
        config,
        _specs(hf, backend),
        vocab_size=-(-hf.vocab_size // tp_size) * tp_size,
        max_sequence_length=hf.max_position_embeddings,
        # With the final norm, and without a matrix for the logits.
        post_process=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        pg_collection=pg_collection,
    )
    model.to(device=device, dtype=dtype)  # Megatron's own norms are built in fp32 on the CPU
    model.rotary_pos_emb.inv_freq = _inverse_frequencies(hf, Path(folder)).to(device)
    weights.load(model, hf, fused_norms=fused_norms, tp_rank=tp_rank, tp_size=tp_size)
    return model.eval().requires_grad_(False)


def _architecture(hf: Any) -> dict[str, Any]:
    """Fields of Megatron's configuration that describe the target."""
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": _head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "qk_layernorm": hf.model_type == "qwen3",
    }


def _head_dim(hf: Any) -> int:
    width: int = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return width


def _specs(hf: Any, backend: str) -> ModuleSpec | TransformerBlockSubmodules:
    qk_layernorm = hf.model_type == "qwen3"
    if backend == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    layer = get_gpt_layer_spec("local", normalization="RMSNorm", qk_layernorm=qk_layernorm)
    # Left to itself, a block takes its final norm of whatever other package is installed.
    return TransformerBlockSubmodules(
        layer_specs=[layer] * hf.num_hidden_layers, layer_norm=layer.submodules.input_layernorm
    )


def _inverse_frequencies(hf: Any, folder: Path) -> torch.Tensor:
    """The target's own frequencies of its rotary embedding, scaled as it has them.

    Raises:
        ConfigError: its angles depend on more than the position.
    """
    import_transformers()
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    types = rope_types(hf)
    partial = (hf.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    if not types <= _ROPE_TYPES or partial != 1.0:
        named = ", ".join(map(repr, sorted(types)))
        raise _unsupported(folder, f"RoPE of type {named} on {partial:.0%} of a head's width")
    # No buffer of the target's any more.
    frequencies: torch.Tensor = LlamaRotaryEmbedding(hf).inv_freq.clone()
    return frequencies


def _read_config(folder: str | os.PathLike[str], tp_size: int) -> Any:
    """The checked configuration, as transformers has it."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"target {path} is not a Hugging Face folder: it has no config.json")
    try:
        hf = import_transformers().AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"target {path} cannot be read: {first_line}") from error
    if hf.model_type not in FAMILIES:
        raise _unsupported(path, f"the family {hf.model_type!r}")
    if getattr(hf, "quantization_config", None) is not None:
        raise _unsupported(path, "quantised weights")
    if hf.hidden_act != "silu":
        raise _unsupported(path, f"the activation {hf.hidden_act!r}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(hf, name, False):
            raise _unsupported(path, f"{name} true")
    if "sliding_attention" in (getattr(hf, "layer_types", None) or ()):
        raise _unsupported(path, "sliding layers")
    _inverse_frequencies(hf, path)
    for what, number in (
        ("query heads", hf.num_attention_heads),
        ("key/value heads", hf.num_key_value_heads),
        ("FFN columns", hf.intermediate_size),
    ):
        if number % tp_size:
            raise ConfigError(
                f"target {path}: {number} {what} cannot be split over a tensor-parallel size of "
                f"{tp_size}; use a divisor, or --online-target-backend hf"
            )
    return hf


def _unsupported(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"target {folder} has {what}; --online-target-backend megatron runs dense "
        f"{', '.join(FAMILIES)} with full attention: use --online-target-backend hf"
    )
