"""The public client loads what we export and agrees with what we measure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.evaluate import DraftModel
from megatron_splitkv.evaluate.cached_target import target_texts
from megatron_splitkv.evaluate.drafters import ModelDrafter
from megatron_splitkv.evaluate.greedy import compare_with_greedy
from megatron_splitkv.evaluate.heads import proposal_head
from megatron_splitkv.export import read_drafter, write_drafter
from tests.evaluate.models import (
    DRAFTER,
    EOS,
    decode_greedily,
    decode_speculatively,
    prompts,
    random_zlab_tensors,
    tiny_target,
)

client = pytest.importorskip("dflash.model")


def load_in_client(folder: Path) -> Any:
    model, info = client.DFlashDraftModel.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()


SLIDING = replace(
    DRAFTER,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=5,  # shorter than the block: slots do not see all of their own block
)


def folder_of(config: DFlashConfig, parent: Path) -> Path:
    write_drafter(parent / "drafter", random_zlab_tensors(config), config)
    return parent / "drafter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(DRAFTER, tmp_path)


def test_client_reads_the_configuration(folder: Path) -> None:
    model = load_in_client(folder)
    assert model.block_size == DRAFTER.block_size
    assert model.mask_token_id == DRAFTER.mask_token_id
    assert tuple(model.target_layer_ids) == DRAFTER.target_layer_ids
    assert model.dtype == torch.float32
    exponents = torch.arange(0, DRAFTER.head_dim, 2) / DRAFTER.head_dim
    torch.testing.assert_close(model.rotary_emb.inv_freq, DRAFTER.rope_theta**-exponents)
    assert model.norm.variance_epsilon == DRAFTER.rms_norm_eps
    assert not any(layer.self_attn.is_causal for layer in model.layers)


@pytest.mark.parametrize("drafter", [DRAFTER, SLIDING], ids=["full", "sliding"])
@torch.inference_mode()
def test_hidden_states_equal_the_clients_step_by_step(
    drafter: DFlashConfig, tmp_path: Path
) -> None:
    folder = folder_of(drafter, tmp_path)
    theirs = load_in_client(folder)
    config, tensors = read_drafter(folder)
    ours = DraftModel.from_tensors(config, tensors)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(40, config.feature_width, generator=generator)
    their_cache, cache = client._make_cache(theirs.config), ours.new_cache(64)
    seen = 0
    for rows, block_size in ((17, 6), (1, 6), (5, 4), (6, 2)):  # an uneven way through the text
        new = features[seen : seen + rows]
        block = torch.randn(block_size, config.hidden_size, generator=generator)
        start = seen + rows
        expected = theirs(
            target_hidden=new[None],
            noise_embedding=block[None],
            position_ids=torch.arange(seen, start + block_size)[None],
            past_key_values=their_cache,
            use_cache=True,
        )[0]
        client._crop_to(their_cache, start)
        ours.extend_context(new, cache)
        hidden = ours.draft(block, cache)
        assert (hidden - expected).abs().max() < 1e-5 * expected.abs().max()
        seen = start
    assert cache.length == seen


# The client calls transformers by a keyword that is being renamed; we do not.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
@pytest.mark.parametrize("stop_token_ids", [(), (EOS, 60, 63)], ids=["no stop", "stop"])
def test_generates_the_clients_tokens_and_acceptance_lengths(
    folder: Path, kind: str, stop_token_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    target = tiny_target(kind)
    theirs = load_in_client(folder)
    config, tensors = read_drafter(folder)
    model, head = DraftModel.from_tensors(config, tensors), proposal_head(config, tensors)
    ours = ModelDrafter(model, head, target)
    lengths: list[int] = []
    with target_texts(target, config.target_layer_ids) as new_text:
        for prompt in prompts(3):
            expected = client.dflash_generate(
                theirs,
                target,
                torch.tensor([prompt]),
                max_new_tokens=41,
                stop_token_ids=list(stop_token_ids) or None,
                return_stats=True,
            )
            (text,) = decode_speculatively(
                new_text(),
                ours,
                [prompt],
                num_proposals=config.num_proposals,
                max_new_tokens=41,
                stop_token_ids=stop_token_ids,
            )
            assert text.new_tokens == expected.output_ids[0, len(prompt) :].tolist()
            assert [step.produced for step in text.steps] == expected.acceptance_lengths
            lengths += expected.acceptance_lengths
            (reference,) = decode_greedily(
                new_text(), [prompt], max_new_tokens=41, stop_token_ids=stop_token_ids
            )
            assert compare_with_greedy(text.new_tokens, reference, new_text()).equal
    assert len(set(lengths)) > 2, "too dull to tell counts apart"
