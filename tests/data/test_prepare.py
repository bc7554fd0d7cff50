"""Preparation goes on where it stopped, in any number of processes, to the same bytes."""

import errno
import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.chat import encode_sample
from megatron_splitkv.data.feature_units import FeatureUnits
from megatron_splitkv.data.held_out import hold_out
from megatron_splitkv.data.prepare import PrepareOptions, prepare
from megatron_splitkv.data.prepare_target import Outline, PrepareTarget
from megatron_splitkv.data.recipe_folder import FolderRecipe
from megatron_splitkv.data.regenerate import Regeneration
from megatron_splitkv.data.sample_stores import write_sample_stores
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import load_target, load_tokenizer
from megatron_splitkv.data.target_states import document_states
from megatron_splitkv.data.text import read_samples
from megatron_splitkv.data.text_units import TextUnits
from megatron_splitkv.data.work import Worker

SAMPLES = 40
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# About six documents a shard.
OPTIONS = PrepareOptions(mask_token_id=257, max_shard_bytes=60_000, device="cpu", batch_tokens=64)


@pytest.fixture(scope="module")
def target(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    load_target(target_folder).save_pretrained(folder)
    tokenizer = load_tokenizer(target_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    with open(path, "w") as lines:
        for i in range(SAMPLES):
            question = {"role": "user", "content": f"{i}: " + "why " * (1 + 7 * i % 11)}
            answer = {"role": "assistant", "content": "because " * (1 + 5 * i % 9)}
            sample = {"conversations": [question, answer]} if i % 4 else {"text": "word " * (i + 2)}
            lines.write(json.dumps(sample) + "\n")
    return path


def checksums(output: Path) -> dict[str, str]:
    return {
        path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in output.rglob("*")
        if path.is_file() and path.name != "prepare.json"
    }


@pytest.fixture(scope="module")
def whole(target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert prepare(FolderRecipe(target, [text]), output, OPTIONS) is not None
    return output


def test_documents_lie_in_the_order_of_the_text(whole: Path, target: Path, text: Path) -> None:
    tokenizer, model = load_tokenizer(target), load_target(target)
    encoded = [
        encode_sample(tokenizer, raw, 4096, vocab_size=258).sample for raw in read_samples([text])
    ]
    held_out = [15, 31]
    kept = [i for i in range(SAMPLES) if i not in held_out]
    prompts = [json.loads(line) for line in (whole / "prompts.jsonl").read_text().splitlines()]
    assert [prompt["id"] for prompt in prompts] == ["sample-15", "sample-31"]
    for name, numbers in (("train", kept), ("valid", held_out)):
        store = FeatureStore(whole / name, verify="full")
        assert store.lengths.tolist() == [encoded[i].token_ids.numel() for i in numbers]
        for document, i in enumerate(numbers):
            assert np.array_equal(store.token_ids(document), encoded[i].token_ids.numpy())
            assert np.array_equal(store.loss_mask(document), encoded[i].loss_mask.numpy())
            pieces = document_states(model, [encoded[i].token_ids], (1, 2))
            features = torch.cat([piece.features for piece in pieces])
            found = store.read_features(document, 0, len(features))
            torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
    assert len(list((whole / "train").glob("shard-*"))) > 4


def test_a_finished_run_holds_nothing_unfinished(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == [
        "lengths.png",
        "prepare.json",
        "prepare_job.json",
        "prompts.jsonl",
        "train",
        "valid",
    ]
    summary = json.loads((whole / "prepare.json").read_text())
    assert summary["train"]["documents"] == 38
    assert summary["train"]["bytes"] == sum(f.stat().st_size for f in (whole / "train").iterdir())
    assert summary["lengths"][0].startswith("40 documents of ")


def interrupted_at(monkeypatch: pytest.MonkeyPatch, unit: int) -> Callable[[], None]:
    """Stop at a unit, after half of its pieces; returns how to go on."""
    write = FeatureUnits.write

    def stopping(self: FeatureUnits, number: int, progress: Any) -> None:
        def stop(done: int, total: int) -> None:
            if number == unit and done * 2 > total:
                raise KeyboardInterrupt
            progress(done, total)

        write(self, number, stop)

    monkeypatch.setattr(FeatureUnits, "write", stopping)
    return lambda: monkeypatch.setattr(FeatureUnits, "write", write)


@pytest.mark.parametrize("unit", [0, 3])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    whole: Path,
    target: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unit: int,
) -> None:
    output, said = tmp_path / "run", list[str]()
    go_on = interrupted_at(monkeypatch, unit)
    with pytest.raises(KeyboardInterrupt):
        prepare(FolderRecipe(target, [text]), output, OPTIONS)
    assert not (output / "train").exists()
    assert not list(output.rglob("*.partial"))
    go_on()
    written: list[int] = []
    monkeypatch.setattr(
        FeatureUnits, "write", noting(FeatureUnits.write, lambda number: written.append(number))
    )
    prepare(FolderRecipe(target, [text]), output, OPTIONS, stages=Stages(say=said.append))
    assert written[0] == unit
    total = written[-1] + 1
    assert said == ([f"features: {unit} of {total} units are there already"] if unit else [])
    assert checksums(output) == checksums(whole)
    said.clear()
    written.clear()
    prepare(FolderRecipe(target, [text]), output, OPTIONS, stages=Stages(say=said.append))
    assert said == [f"{output} is prepared already: nothing to do"]
    assert not written


def noting(write: Any, note: Callable[[int], None]) -> Any:
    def noted(self: FeatureUnits, number: int, progress: Any) -> None:
        note(number)
        write(self, number, progress)

    return noted


def test_processes_share_the_shards(
    whole: Path, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: dict[int, str] = {}
    monkeypatch.setattr(
        FeatureUnits,
        "write",
        noting(
            FeatureUnits.write,
            lambda number: writers.update({number: threading.current_thread().name}),
        ),
    )
    results: dict[int, Any] = {}

    def process(rank: int) -> None:
        recipe = FolderRecipe(target, [text])
        results[rank] = prepare(recipe, tmp_path / "run", OPTIONS, worker=Worker(rank, 3))

    threads = [
        threading.Thread(target=process, args=(rank,), name=f"rank {rank}") for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writers) > 5
    assert writers == {unit: f"rank {unit % 3}" for unit in range(len(writers))}
    assert results[0]["train"]["documents"] == 38
    assert results[1] is None
    assert results[2] is None
    assert checksums(tmp_path / "run") == checksums(whole)


def test_a_follower_that_comes_late_has_nothing_to_do(
    whole: Path, target: Path, text: Path
) -> None:
    before = checksums(whole)
    assert prepare(FolderRecipe(target, [text]), whole, OPTIONS, worker=Worker(1, 2)) is None
    assert checksums(whole) == before


def test_tokens_only_leaves_out_the_states(
    whole: Path, target: Path, text: Path, tmp_path: Path
) -> None:
    options = PrepareOptions(mask_token_id=257, tokens_only=True, device="cpu")
    summary = prepare(FolderRecipe(target, [text]), tmp_path / "run", options)
    assert summary is not None
    assert summary["tokens_only"] is True
    for name in ("train", "valid"):
        store = FeatureStore(tmp_path / "run" / name, verify="full")
        full = FeatureStore(whole / name)
        assert not store.meta.has_features
        assert store.meta.target == full.meta.target
        assert store.lengths.tolist() == full.lengths.tolist()
        assert np.array_equal(store.token_ids(1), full.token_ids(1))
        assert summary[name]["bytes"] < 300 + 5 * store.lengths.sum() + 70_000
    embedding, head = FeatureStore(tmp_path / "run" / "train").frozen()
    expected_embedding, expected_head = FeatureStore(whole / "train").frozen()
    assert torch.equal(embedding, expected_embedding)
    assert torch.equal(head, expected_head)


def test_regenerated_answers_do_not_depend_on_where_it_was_stopped(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_splitkv.data.regenerate._UNIT", 16)
    recipe = FolderRecipe(
        target, [text], regeneration=Regeneration(max_new_tokens=5, temperature=1.0, seed=2)
    )
    options = PrepareOptions(mask_token_id=257, tokens_only=True, device="cpu")
    summary = prepare(recipe, tmp_path / "whole", options)
    assert summary is not None
    assert summary["answers"] == SAMPLES
    assert summary["answers_cut"] + summary["answers_empty"] > 0
    write = AnswerUnits.write

    def stopping(self: AnswerUnits, folder: Path, unit: int, progress: Any) -> None:
        if unit == 2:
            raise KeyboardInterrupt
        write(self, folder, unit, progress)

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(AnswerUnits, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, output, options)
    assert len(list((output / "prepare_job" / "answers").iterdir())) == 2
    said: list[str] = []
    prepare(recipe, output, options, stages=Stages(say=said.append))
    assert said == ["answers: 2 of 3 units are there already"]
    assert checksums(output) == checksums(tmp_path / "whole")


@pytest.mark.parametrize("processes", [1, 3])
def test_the_text_is_tokenised_in_units_to_the_bytes_of_one_pass(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr("megatron_splitkv.data.text_units._UNIT_BYTES", 600)
    monkeypatch.setattr("megatron_splitkv.data.text_units._CALL_BYTES", 250)
    options = PrepareOptions(mask_token_id=257, tokens_only=True, device="cpu")
    output, write, done = tmp_path / "run", TextUnits.write, list[int]()

    def process(rank: int) -> None:
        recipe = FolderRecipe(target, [text], sequence_length=40)
        prepare(recipe, output, options, worker=Worker(rank, processes))

    def stopping(self: TextUnits, folder: Path, unit: int, progress: Any) -> None:
        if unit == 2 * processes:
            raise KeyboardInterrupt
        write(self, folder, unit, progress)
        done.append(unit)

    monkeypatch.setattr(TextUnits, "write", stopping)
    with pytest.raises(KeyboardInterrupt):
        process(0)  # Alone: the others come later, and find the leader's work.
    assert done == [0, processes]
    assert len(list((output / "prepare_job" / "tokenise").iterdir())) == 2
    monkeypatch.setattr(
        TextUnits,
        "write",
        lambda self, folder, unit, progress: (
            done.append(unit),
            write(self, folder, unit, progress),
        ),
    )
    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(len(done)))
    assert len(done) > 2 * processes + 1

    tokenizer, loaded = load_tokenizer(target), load_target(target)
    encoded = (encode_sample(tokenizer, raw, 40, vocab_size=258) for raw in read_samples([text]))
    expected = tmp_path / "expected"
    expected.mkdir()
    write_sample_stores(
        expected / "stores",
        expected / "prompts.jsonl",
        FeatureStore(output / "train").meta.target,
        hold_out(enumerate(encoded), tokenizer),
        options.max_shard_bytes,
        lambda: (
            loaded.get_input_embeddings().weight.cpu(),
            loaded.get_output_embeddings().weight.cpu(),
        ),
    )
    for name in ("train", "valid"):
        assert checksums(output / name) == checksums(expected / "stores" / name)
    assert (output / "prompts.jsonl").read_bytes() == (expected / "prompts.jsonl").read_bytes()


def test_a_flipped_bit_in_an_unfinished_run_does_not_get_a_checksum(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = interrupted_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare(FolderRecipe(target, [text]), tmp_path, OPTIONS)
    go_on()
    (shard,) = (tmp_path / "prepare_job/samples/train").glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"samples/train/shard-0+\.safetensors is corrupted"):
        prepare(FolderRecipe(target, [text]), tmp_path, OPTIONS)


def test_a_full_disk_keeps_the_tokenised_units(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_splitkv.data.text_units._UNIT_BYTES", 600)
    options = PrepareOptions(mask_token_id=257, tokens_only=True, device="cpu")
    write, said = TextUnits.write, list[str]()

    def full(self: TextUnits, folder: Path, unit: int, progress: Any) -> None:
        if unit == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, folder, unit, progress)

    with monkeypatch.context() as patch:
        patch.setattr(TextUnits, "write", full)
        with pytest.raises(ConfigError, match="no space left in"):
            prepare(FolderRecipe(target, [text]), tmp_path / "run", options)
    recipe, stages = FolderRecipe(target, [text]), Stages(say=said.append)
    assert prepare(recipe, tmp_path / "run", options, stages=stages) is not None
    (line,) = said
    assert line.startswith("tokenise: 2 of ")


def test_weights_that_are_cut_short_are_found_before_all_work(
    target: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    begun: list[str] = []
    stages = Stages(watch=lambda name: begun.append(name) or (lambda done, total: None))
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        prepare(FolderRecipe(folder, [text]), tmp_path / "run", OPTIONS, stages=stages)
    assert begun == []
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_trained_on_is_left_out_and_counted(
    target: Path, text: Path, tmp_path: Path
) -> None:
    lengths = [
        encode_sample(load_tokenizer(target), raw, 40, vocab_size=258)
        for raw in read_samples([text])
    ]
    expected = sum(each.without_response for each in lengths)
    assert expected > 0
    options = PrepareOptions(mask_token_id=257, tokens_only=True, device="cpu")
    summary = prepare(FolderRecipe(target, [text], sequence_length=40), tmp_path / "run", options)
    assert summary is not None
    assert summary["without_response"] == expected
    kept = [e for e in lengths if not e.without_response]
    assert summary["truncated"] == sum(e.truncated > 0 for e in kept)
    assert summary["truncated_tokens"] == sum(e.truncated for e in kept)
    documents = [summary[name]["documents"] for name in ("train", "valid")]
    assert sum(documents) == SAMPLES - expected
    assert documents[1] == (SAMPLES - expected) // 16


def test_a_full_disk_loses_nothing(
    whole: Path, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub of the write is the store's; here: what is finished stays, and the job goes on."""
    write = FeatureUnits.write

    def full(self: FeatureUnits, number: int, progress: Any) -> None:
        if number == 4:
            raise ConfigError("the disk is full")
        write(self, number, progress)

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(FeatureUnits, "write", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            prepare(FolderRecipe(target, [text]), output, OPTIONS)
    said: list[str] = []
    prepare(FolderRecipe(target, [text]), output, OPTIONS, stages=Stages(say=said.append))
    assert said[0].startswith("features: 4 of ")
    assert checksums(output) == checksums(whole)


def test_a_kill_behind_the_index_leaves_no_sidecars(
    whole: Path, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    with monkeypatch.context() as killed:
        killed.setattr("megatron_splitkv.data.store_writer.tidy_store", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(FolderRecipe(target, [text]), output, OPTIONS)
    assert list(output.rglob("shard-*.json"))
    prepare(FolderRecipe(target, [text]), output, OPTIONS)
    assert checksums(output) == checksums(whole)


def stopped(path: Path) -> None:
    raise KeyboardInterrupt


def test_a_run_survives_a_command_that_is_refused(
    whole: Path, target: Path, text: Path, tmp_path: Path
) -> None:
    output, broken = tmp_path / "run", tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": ')
    prepare(FolderRecipe(target, [text]), output, OPTIONS)
    summary = (output / "prepare.json").read_bytes()
    with pytest.raises(ConfigError, match=r"broken.jsonl line 2 is broken"):
        prepare(FolderRecipe(target, [broken]), output, OPTIONS, overwrite=True)
    assert checksums(output) == checksums(whole)
    assert (output / "prepare.json").read_bytes() == summary
    shorter = FolderRecipe(target, [text], sequence_length=30)
    prepare(shorter, output, OPTIONS, overwrite=True)
    assert FeatureStore(output / "train").lengths.max() == 30
    assert not (output / "prepare_job").exists()


def test_an_answered_prompt_outside_the_vocabulary_leaves_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "\xe9"}, {"role": "assistant", "content": "ab"}]
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"conversations": messages}))
    outline = PrepareTarget.outline.func

    def fewer(self: PrepareTarget) -> Outline:
        return replace(outline(self), vocab_size=180)

    monkeypatch.setattr(PrepareTarget, "outline", property(fewer))
    recipe = FolderRecipe(target, [text], regeneration=Regeneration(max_new_tokens=2))
    options = replace(OPTIONS, mask_token_id=7)
    monkeypatch.setattr(FolderRecipe, "check", lambda self, options: None)
    monkeypatch.setattr(PrepareTarget, "model", None)
    with pytest.raises(ConfigError, match=r"line 1: token 195 is outside .* vocabulary of 180"):
        prepare(recipe, tmp_path / "run", options)
    assert not (tmp_path / "run").exists()


def test_a_target_with_an_end_of_positions_reads_no_longer_text(
    target: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outline = Outline(4, 8, 100, (), None, num_positions=64)
    monkeypatch.setattr(Outline, "read", lambda path: outline)
    FolderRecipe(target, [text], 64).check(replace(OPTIONS, mask_token_id=None))
    with pytest.raises(ConfigError, match=r"at most 64 tokens; give --sequence-length 64 or less"):
        FolderRecipe(target, [text], 65).check(OPTIONS)
    with pytest.raises(ConfigError, match=r"--sequence-length 48 \(and --max-new-tokens 16\)"):
        FolderRecipe(target, [text], 64, Regeneration(max_new_tokens=16)).check(OPTIONS)
    with pytest.raises(ConfigError, match=r"leaves no room .* at most --max-new-tokens 32"):
        FolderRecipe(target, [text], 2, Regeneration(max_new_tokens=63)).check(OPTIONS)
