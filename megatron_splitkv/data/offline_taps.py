"""Which of a target's layers another trainer tapped: asked of the target, not of a convention.

Trainers count layers differently, and a row's width does not tell layer 17 from layer 18. So the
target reads the first tokens of some samples itself, and every plane of a sample's rows is compared
with the output of every layer. The layer that a plane was taken from differs by the rounding of
two implementations, its neighbours by what a layer adds.

Shape legend: n compared tokens, C planes, N layers, d hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_data import OfflineData, OfflineSample
from megatron_splitkv.data.target_states import document_states

_COMPARED_TOKENS = 64
# Samples that are compared: the first, and others evenly spread. A folder that was prepared twice,
# with other layers for what was missing, holds both kinds.
_COMPARED_SAMPLES = 17
# Relative distance of a row: other weights are near sqrt(2), a quantised target's states near 0.1.
_SAME_TARGET = 0.5


@dataclass(frozen=True)
class TappedStates:
    """What the planes of another trainer's rows are.

    Args:
        target_layer_ids: 0-based layer outputs of the tapped planes, in their order.
        final_normed: whether the final hidden states are those behind the target's final norm;
            None where the data has none.
    """

    target_layer_ids: tuple[int, ...]
    final_normed: bool | None


def find_tapped_layers(
    model: Any, data: OfflineData, target_layer_ids: Sequence[int] | None = None
) -> TappedStates:
    """What the rows of a folder are, by its first sample, compared with others spread over it.

    Args:
        model: from `load_target`.
        data: the folder.
        target_layer_ids: 0-based layer outputs that the planes shall be; None takes what is found.

    Raises:
        ConfigError: see `find_tapped_states`; or a sample of other layers than the first.
    """
    first = data.open(0)
    found = find_tapped_states(model, data, first, target_layer_ids)
    for number in np.unique(np.linspace(0, len(data) - 1, _COMPARED_SAMPLES, dtype=int))[1:]:
        sample = data.open(int(number))
        if (sample.feature_width, sample.final_width) != (first.feature_width, first.final_width):
            continue  # refused by name when all samples are gone through
        if (other := find_tapped_states(model, data, sample)) != found:
            raise ConfigError(
                f"{sample.path} holds {_described(other)}, {first.path.name} {_described(found)}; "
                "import data of one preparation at a time"
            )
    return found


@torch.no_grad()
def find_tapped_states(
    model: Any,
    data: OfflineData,
    sample: OfflineSample,
    target_layer_ids: Sequence[int] | None = None,
) -> TappedStates:
    """Compare the first rows of a sample with every layer of the target.

    Args:
        model: from `load_target`.
        data: the sample's folder.
        sample: the one to compare.
        target_layer_ids: 0-based layer outputs that the planes shall be; None takes what is found.

    Raises:
        ConfigError: rows that are not whole layers of the target, hidden states of another target,
            or of other layers than the given ones.
    """
    config = model.config.get_text_config(decoder=True)
    width, num_layers = config.hidden_size, config.num_hidden_layers
    planes, rest = divmod(sample.feature_width, width)
    wrong_final = sample.final_width not in (0, width)
    if rest or not planes or wrong_final:
        found = sample.final_width if wrong_final else sample.feature_width
        raise ConfigError(
            f"{sample.path}: rows of {found} numbers are no whole layers of the target, whose "
            f"hidden size is {width}; name the target that they were made with"
        )
    if target_layer_ids is not None and len(target_layer_ids) != planes:
        raise ConfigError(
            f"{sample.path}: rows of {sample.feature_width} numbers are {planes} layers of "
            f"{width}, but --target-layer-ids names {len(target_layer_ids)}"
        )
    n = min(sample.num_tokens, _COMPARED_TOKENS)
    ids = sample.token_ids[:n]
    check_vocabulary(sample, model.get_input_embeddings().weight.shape[0])
    (piece,) = document_states(model, [ids], range(num_layers))
    # [n, N + 1, d]: every layer's output, then what the head reads.
    reference = torch.cat([piece.features, piece.final_hidden], dim=-1).float()
    reference = reference.view(n, num_layers + 1, width)
    features, final = sample.read(0, n)
    layer_ids = []
    for i, plane in enumerate(features.float().view(n, planes, width).unbind(1)):
        layer_ids.append(_closest(sample, f"layer plane {i}", plane, reference))
    if num_layers in layer_ids:
        raise ConfigError(
            f"{sample.path}: layer plane {layer_ids.index(num_layers)} holds what the head "
            "reads, behind its final norm, and no layer's output; tap other layers"
        )
    found_ids = tuple(layer_ids)
    if target_layer_ids is not None and tuple(target_layer_ids) != found_ids:
        theirs = [i + data.layer_id_offset for i in found_ids]
        aside = f" ({data.trainer} names them {_commas(theirs)})" if data.layer_id_offset else ""
        raise ConfigError(
            f"{sample.path} holds the outputs of target layers {_commas(found_ids)}{aside}, not of "
            f"{_commas(target_layer_ids)}; give --target-layer-ids {_commas(found_ids)}"
        )
    if final is None:
        return TappedStates(found_ids, None)
    last = _closest(sample, "the last plane", final.float(), reference)
    if last < num_layers - 1:
        raise ConfigError(
            f"{sample.path}: the last plane is the output of target layer {last}, expected that of "
            f"the last layer, {num_layers - 1}; prepare it again with the last layer included"
        )
    return TappedStates(found_ids, final_normed=last == num_layers)


def check_vocabulary(sample: OfflineSample, vocab_size: int) -> None:
    """Refuse tokens that the target does not have.

    Raises:
        ConfigError: naming the file and the token.
    """
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{sample.path} has token {low if low < 0 else high}, outside the target's vocabulary "
            f"of {vocab_size}; name the target that it was made with"
        )


@torch.no_grad()
def find_final_norm(model: Any) -> nn.Module:
    """The module of the target's decoder whose output is the decoder's own.

    Args:
        model: from `load_target`.

    Raises:
        ConfigError: no single module makes the decoder's output.
    """
    outputs: list[tuple[nn.Module, torch.Tensor]] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.append((module, output))

    decoder = model.get_decoder()
    handles = [module.register_forward_hook(keep) for module in decoder.children()]
    try:
        ids = torch.arange(4, device=model.device)[None]
        final = decoder(input_ids=ids, use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    for module, output in reversed(outputs):
        if output.data_ptr() == final.data_ptr():
            return module
    raise ConfigError(
        f"{type(model).__name__} has no final norm to apply to the imported states; import them "
        "without --final-hidden"
    )


def _closest(sample: OfflineSample, name: str, plane: torch.Tensor, reference: torch.Tensor) -> int:
    """Index of the reference states ``[n, L, d]`` that are closest to a plane ``[n, d]``."""
    if not plane.isfinite().all():
        raise ConfigError(
            f"{sample.path}: {name} is not finite; remove the file, or prepare it again"
        )
    distance = (reference - plane[:, None]).norm(dim=-1) / reference.norm(dim=-1)
    # The median: the first token's state is often large beyond measure, and hardly changes.
    distance = distance.median(dim=0).values
    closest = int(distance.argmin())
    if not distance[closest] < _SAME_TARGET:
        raise ConfigError(
            f"{sample.path}: {name} is {float(distance[closest]):.0%} away from the closest layer "
            "of the target; name the target that it was made with"
        )
    return closest


def _described(states: TappedStates) -> str:
    final = {None: "", True: " and normed final states", False: " and final states without norm"}
    return f"target layers {_commas(states.target_layer_ids)}{final[states.final_normed]}"


def _commas(layer_ids: Sequence[int]) -> str:
    return ",".join(map(str, layer_ids))
