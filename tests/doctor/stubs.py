"""Stand-ins for Transformer Engine and apex as folders on PYTHONPATH, whole and spoilt."""

from pathlib import Path

ALL_APEX = (
    "apex/optimizers/__init__.py",
    "apex/multi_tensor_apply.py",
    "apex/normalization/fused_layer_norm.py",
    "apex/contrib/layer_norm/layer_norm.py",
    "amp_C.py",
    "fused_layer_norm_cuda.py",
    "fused_weight_gradient_mlp_cuda.py",
)
_APEX_SOURCE = """
class FusedAdam: ...
class FusedSGD: ...
class FusedLayerNormAffineFunction: ...
class FastLayerNormFN: ...
multi_tensor_applier = multi_tensor_scale = multi_tensor_l2norm = None
"""
# The functions as of release 2.20.2, by their names.
_FUSED_ATTENTION = """
FusedAttnBackend = {"F16_arbitrary_seqlen": 1}

def fused_attn_fwd(is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v,
                   fake_dtype, fused_attention_backend, cu_seqlens_q_padded=None,
                   cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0, qkv_layout="",
                   o_format="sbhd", attn_mask_type="padding", rng_gen=None): ...

def fused_attn_bwd(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o,
                   fake_dtype, aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None,
                   cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0, qkv_layout="",
                   o_format="sbhd", do_format="sbhd", dqkv_layout="", attn_mask_type="padding",
                   deterministic=False): ...
"""
_TE_OPTIMIZERS = """
class FusedAdam: ...
class FusedSGD: ...
multi_tensor_applier = multi_tensor_scale = multi_tensor_l2norm = multi_tensor_scale_tensor = None
"""


def write(root: Path, files: dict[str, str]) -> None:
    """Write modules, and the packages that they lie in."""
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(root).parents:
            if folder != Path("."):
                (root / folder / "__init__.py").touch()
        path.write_text(source)


def write_apex(root: Path, files: tuple[str, ...] = ALL_APEX) -> None:
    """Apex with these of its files."""
    write(root, dict.fromkeys(files, _APEX_SOURCE))


def write_transformer_engine(root: Path, version: str = "2.20.2", source: str = "") -> None:
    """Transformer Engine that can be imported, unless `source` prevents it."""
    package = "transformer_engine/pytorch"
    write(
        root,
        {
            f"{package}/cpp_extensions/fused_attn.py": _FUSED_ATTENTION,
            f"{package}/constants.py": "TE_DType = {}",
            f"{package}/optimizers.py": _TE_OPTIMIZERS,
            "transformer_engine/__init__.py": f"__version__ = {version!r}\n{source}",
        },
    )
