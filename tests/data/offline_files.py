"""Files as SpecForge and speculators publish them, of a real model's states."""

import gzip
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@torch.no_grad()
def hidden_states(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Embedding output and every layer's raw output ``[n, d]``, and what the head reads.

    By Hugging Face's own numbering: entry 0 is the embedding, entry i + 1 the output of layer i.
    `output_hidden_states` gives the last entry behind the final norm, so a hook takes the raw one.
    """
    raw: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: raw.append(output if torch.is_tensor(output) else output[0])
    )
    outputs = model.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [state[0] for state in outputs.hidden_states]
    return [*states[:-1], raw[0][0]], outputs.last_hidden_state[0]


def specforge_sample(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, target_layer_ids: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The DFlash layout: 0-based layer outputs, that is entry id + 1, and a batch axis of one."""
    states, _ = hidden_states(model, ids)
    features = torch.cat([states[i + 1] for i in target_layer_ids], dim=-1)
    return {"input_ids": ids, "loss_mask": mask.long(), "hidden_states": features[None]}


def dspark_sample(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, target_layer_ids: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The DSpark layout: what the head reads, too."""
    sample = specforge_sample(model, ids, mask, target_layer_ids)
    return {**sample, "target_last_hidden_states": hidden_states(model, ids)[1][None]}


def eagle3_sample(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, target_layer_ids: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The EAGLE-3 layout: the same states under other names."""
    sample = dspark_sample(model, ids, mask, target_layer_ids)
    return {
        "input_ids": ids,
        "loss_mask": mask.long(),
        "hidden_state": sample["target_last_hidden_states"],
        "aux_hidden_state": sample["hidden_states"],
    }


def save_specforge(folder: Path, number: int, sample: dict[str, Any], packed: bool = False) -> Path:
    """``rows_0-2000/data_{i}.ckpt``, gzipped if so wished."""
    group = number // 2000 * 2000
    path = folder / f"rows_{group}-{group + 2000}" / f"data_{number}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not packed:
        torch.save(sample, path)
        return path
    buffer = io.BytesIO()
    torch.save(sample, buffer)
    path = path.with_name(path.name + ".gz")
    path.write_bytes(gzip.compress(buffer.getvalue(), 1))
    return path


def save_speculators(
    folder: Path, row: int, model: Any, ids: torch.Tensor, layer_ids: tuple[int, ...]
) -> Path:
    """``hidden_states/hs_{row}.safetensors``; speculators' layer ids, the last layer among them."""
    states, _ = hidden_states(model, ids)
    planes = torch.stack([states[i] for i in (*layer_ids, len(states) - 1)], dim=1)
    path = folder / "hidden_states" / f"hs_{row}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"token_ids": ids, "hidden_states": planes.contiguous()}, path)
    return path
