"""`splitkv prepare` from the command line: what it leaves, and what it refuses."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.cli import build_parser, main
from megatron_splitkv.cli.prepare import _recipe
from megatron_splitkv.cli.prepare_report import print_summary
from megatron_splitkv.data.prepare_target import Outline
from megatron_splitkv.data.recipe_folder import FolderRecipe
from megatron_splitkv.data.recipe_smollm2 import SmolLM2Budget
from megatron_splitkv.data.recipe_tiny import TinyBudget
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.target_states import document_states
from megatron_splitkv.data.text import standard_library_text
from tests.data.targets import random_target

TEXT = "".join(f"def f{i}(x):\n    return x + {i} * {i * i}\n" for i in range(4000))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text(TEXT)
    arguments = ["--target", "tiny", "--minutes", "0.2", "--text", str(folder / "text.txt")]
    assert main(["prepare", "--output", str(folder / "run"), *arguments]) == 0
    return folder / "run"


def test_tiny_leaves_a_whole_run(run_folder: Path) -> None:
    train = FeatureStore(run_folder / "train", verify="full")
    valid = FeatureStore(run_folder / "valid", verify="full")
    assert train.meta == valid.meta
    assert train.meta.target_layer_ids == (1, 2)
    assert set(train.lengths) == set(valid.lengths) == {128}
    assert train.loss_mask(0).tolist() == [False] * 32 + [True] * 96
    summary = json.loads((run_folder / "prepare.json").read_text())
    assert summary["train"]["documents"] == len(train) == 40
    assert summary["train"]["supervised_tokens"] == 40 * 96
    assert summary["train"]["bytes"] == sum(
        file.stat().st_size for file in (run_folder / "train").iterdir()
    )
    assert summary["target_folder"] == "target"
    assert summary["target_checksum"] == train.meta.target.checksum
    assert set(summary["seconds"]) == {
        "train target",
        "load target",
        "answers",
        "samples",
        "features",
    }


def test_stored_rows_are_the_target_s_own(run_folder: Path) -> None:
    store, model = FeatureStore(run_folder / "train"), load_target(run_folder / "target")
    embedding, head = store.frozen()
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    ids = torch.from_numpy(store.token_ids(5))
    (piece,) = document_states(model, [ids], (1, 2))
    torch.testing.assert_close(store.read_features(5, 0, 128), piece.features, rtol=1e-4, atol=1e-4)
    (response,) = respond(model, [ids[:32]], 96, batch_size=1)
    assert response.tolist() == ids[32:].tolist()


def test_held_out_prompts_occur_in_no_training_document(run_folder: Path) -> None:
    lines = (run_folder / "prompts.jsonl").read_text().splitlines()
    prompts = [bytes(json.loads(line)["token_ids"]) for line in lines]
    assert len(set(prompts)) == len(prompts) == 48
    cut = TEXT.encode()[: len(TEXT) - len(TEXT) // 32]
    train = FeatureStore(run_folder / "train")
    assert all(bytes(train.token_ids(i)[:32].astype(np.uint8).tolist()) in cut for i in range(40))
    assert not any(prompt in cut for prompt in prompts)
    valid = FeatureStore(run_folder / "valid")
    heads = {bytes(valid.token_ids(i)[:32].astype(np.uint8).tolist()) for i in range(len(valid))}
    assert not heads & set(prompts)


def test_a_prepared_run_is_replaced_only_on_request(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[: len(TEXT) // 2])
    output = tmp_path / "run"
    arguments = ["prepare", "--target", str(run_folder / "target"), "--text", str(text)]
    (tmp_path / "more.txt").write_text("x = 1\n" * 30)
    arguments += [str(tmp_path / "more.txt"), "--output", str(output), "--sequence-length", "100"]
    assert main(arguments) == 0  # the tokenizer names its mask token
    assert main([*arguments, "--mask-token-id", "257"]) == 2
    error = capsys.readouterr().err
    assert (
        "already holds a prepared run of another command (mask_token_id: none, here 257)" in error
    )
    assert main([*arguments, "--mask-token-id", "257", "--overwrite", "--dtype", "bfloat16"]) == 0
    assert FeatureStore(output / "train").meta.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("positions", "options", "length", "line"),
    [
        (None, "", 4096, None),  # rotary positions
        (4096, "", 4096, None),
        (1024, "", 1024, "--sequence-length is 1024: target {} reads at most 1024 tokens"),
        (1024, "--sequence-length 512", 512, None),
        (4100, "--regenerate --max-new-tokens 4", 4096, None),
        (
            4096,
            "--regenerate --max-new-tokens 96",
            4000,
            "--sequence-length is 4000: target {} reads at most 4096 tokens, 96 of them for an "
            "answer",
        ),
    ],
)
def test_the_default_length_fits_the_target_s_positions(
    positions: int | None,
    options: str,
    length: int,
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outline = Outline(4, 8, 100, (), None, positions)
    monkeypatch.setattr(Outline, "read", lambda path: outline)
    words = ["prepare", "--target", str(tmp_path), "--text", "x.jsonl", *options.split()]
    said: list[str] = []
    recipe = _recipe(build_parser().parse_args(words), said.append)
    assert recipe.options()["sequence_length"] == length
    assert said == ([] if line is None else [line.format(tmp_path)])


def test_a_run_knows_the_length_that_was_chosen(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever names that length means the same run."""
    outline = replace(Outline.read(run_folder / "target"), num_positions=64)
    monkeypatch.setattr(Outline, "read", lambda path: outline)
    (tmp_path / "x.txt").write_text(TEXT[:100])
    words = ["prepare", "--target", str(run_folder / "target"), "--output", str(tmp_path / "run")]
    words += ["--text", str(tmp_path / "x.txt"), str(tmp_path / "x.txt"), "--tokens-only"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("--sequence-length is 64: target") == 1
    assert FeatureStore(tmp_path / "run" / "train").lengths.tolist() == [64]
    assert main([*words, "--sequence-length", "64"]) == 0
    assert "is prepared already: nothing to do" in capsys.readouterr().err
    assert main([*words, "--sequence-length", "63"]) == 2
    assert "(sequence_length: 64, here 63)" in capsys.readouterr().err


def test_folder_recipe_reads_json_lines_and_counts_what_it_cut(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": TEXT[i * 50 : i * 50 + 40 + i]}) for i in range(35)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    arguments = ["--target", str(run_folder / "target"), "--output", str(tmp_path / "run")]
    arguments += ["--text", str(tmp_path / "x.jsonl"), "--sequence-length", "64", "--json"]
    arguments += ["--target-layer-ids", "0,3", "--mask-token-id", "257"]
    assert main(["prepare", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["truncated"] == 10
    assert summary["target_layer_ids"] == [0, 3]
    assert summary["train"]["documents"] == 33
    assert summary["valid"]["documents"] == summary["prompts"] == 2
    store = FeatureStore(tmp_path / "run" / "train")
    assert store.lengths.max() == 64
    assert (tmp_path / "run" / summary["target_folder"]).resolve() == run_folder / "target"


def test_conversations_carry_loss_on_the_last_message(run_folder: Path, tmp_path: Path) -> None:
    from megatron_splitkv.data.target import load_tokenizer

    target = tmp_path / "chat"
    load_target(run_folder / "target").save_pretrained(target)
    tokenizer = load_tokenizer(run_folder / "target")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(target)
    sample = {
        "conversations": [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "because"},
        ]
    }
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps(sample)] * 2))
    arguments = ["--target", str(target), "--output", str(tmp_path / "run")]
    arguments += ["--text", str(tmp_path / "x.jsonl"), "--mask-token-id", "257"]
    assert main(["prepare", *arguments]) == 0
    store = FeatureStore(tmp_path / "run" / "train")
    ids, mask = store.token_ids(0), store.loss_mask(0)
    assert bytes(ids[~mask].tolist()) == b"<user>why?;<assistant>"
    assert bytes(ids[mask].tolist()) == b"because;"
    prompt = json.loads((tmp_path / "run" / "prompts.jsonl").read_text())
    assert prompt["text"] == "<user>why?;<assistant>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nowhere"], "neither tiny, smollm2 nor a folder"),
        (["--target", "{target}", "--text", "{text}", "--target-layer-ids", "9"], "layer 9 does"),
        (["--regenerate"], "--regenerate does not apply to tiny"),
        (["--target", "{target}", "--text", "{text}", "--regenerate"], "the text holds none"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0 or more"),
        (["--shard-megabytes", "0"], "--shard-megabytes 0.0 must be more than 0"),
        (["--batch-tokens", "0"], "--batch-tokens 0 must be at least 1"),
        (["--tokens-only", "--final-hidden"], "--tokens-only stores no hidden states"),
        (["--device", "tpu"], "--device tpu is not there"),
        (["--target", "{target}", "--text", "{short}"], "short.jsonl line 3"),
        (["--minutes", "0"], "--minutes 0.0 must be more than 0"),
        (["--sequence-length", "1"], "--sequence-length 1 must be at least 2"),
        (["--seed", "4294967296"], "--seed 4294967296 must be below 4294967296"),
        (["--mask-token-id", "3"], "does not apply to tiny"),
        (["--text", "missing.txt"], "cannot be read"),
        (["--target-layer-ids", "1,9"], "target layer 9 does not exist"),
        (["--target", "{target}"], "needs --text FILE"),
        (
            ["--target", "{target}", "--text", "{text}", "--mask-token-id", "256"],
            "is the end-of-sequence token",
        ),
        (
            ["--target", "{target}", "--text", "{text}", "--mask-token-id", "32"],
            "mask token 32 occurs",
        ),
        (
            ["--target", "{target}", "--text", "{text}", "--mask-token-id", "999"],
            "outside the vocabulary of 258",
        ),
        (["--target", "{target}", "--text", "{one}", "--mask-token-id", "257"], "too few"),
        (["--target", "{target}", "--text", "{broken}", "--mask-token-id", "257"], "line 2"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    names = {"target": str(run_folder / "target")}
    for name, suffix, content in (
        ("text", ".jsonl", '{"text": "a b c d"}\n' * 3),
        ("one", ".jsonl", '{"text": "a b c d"}\n'),
        ("broken", ".jsonl", '{"text": "abc"}\n{"tex'),
        ("short", ".jsonl", '{"text": "abc"}\n{"text": "abc"}\n{"text": "a"}\n'),
    ):
        names[name] = str(tmp_path / f"{name}{suffix}")
        Path(names[name]).write_text(content)
    filled = [argument.format(**names) for argument in arguments]
    assert main(["prepare", "--output", str(tmp_path / "run"), *filled]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("splitkv")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "run").exists()


def test_budgets_grow_with_the_minutes() -> None:
    assert TinyBudget.for_minutes(10) == TinyBudget()
    assert SmolLM2Budget.for_minutes(10) == SmolLM2Budget()
    hour = SmolLM2Budget.for_minutes(60)
    assert (hour.responses, hour.response_tokens, hour.text_tokens) == (144, 160, 180_000)
    assert TinyBudget.for_minutes(0.01).steps == 20


def test_windows_of_the_library_do_not_leak() -> None:
    files = standard_library_text()
    assert {f.name for f in files if f.held_out}.isdisjoint(
        {f.name for f in files if not f.held_out}
    )


def test_verify_names_every_damaged_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--verify", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("whole") == 3
    rest = "no checksums are recorded of prepare.json, prepare_job.json: not checked"
    assert out.splitlines()[-1] == f"{run_folder}: {rest}"
    shutil.copytree(run_folder, tmp_path / "run")
    damaged = [
        tmp_path / "run" / "train" / "target_frozen.safetensors",
        tmp_path / "run" / "valid" / "shard-00000.safetensors",
        tmp_path / "run" / "prompts.jsonl",
        tmp_path / "run" / "target" / "model.safetensors",
    ]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    assert main(["prepare", "--verify", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().out.splitlines()
    corrupted = [line.split(" is corrupted")[0].strip() for line in lines if "is corrupted" in line]
    assert corrupted == list(map(str, damaged))
    assert main(["prepare", "--verify", str(tmp_path / "run" / "valid"), "--json"]) == 2
    (check,) = json.loads(capsys.readouterr().out).values()
    assert (check["files"], len(check["problems"])) == (1, 1)


def test_a_run_of_before_has_no_checksums_beside_its_stores(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    summary = json.loads((run_folder / "prepare.json").read_text())
    del summary["files"]
    (tmp_path / "run" / "prepare.json").write_text(json.dumps(summary))
    assert main(["prepare", "--verify", str(tmp_path / "run")]) == 0
    *stores, rest = capsys.readouterr().out.splitlines()
    assert len(stores) == 2
    assert "no checksums are recorded of lengths.png, prepare.json, prepare_job.json" in rest
    assert rest.endswith("prompts.jsonl, target: not checked")


def test_verify_needs_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--verify", str(tmp_path)]) == 2
    assert "is neither a store nor a prepared run" in capsys.readouterr().err
    assert main(["prepare"]) == 2
    assert "prepare needs --output FOLDER, or --verify DIR" in capsys.readouterr().err


def test_help_does_without_torch() -> None:
    code = (
        "import sys; from megatron_splitkv.cli import build_parser; build_parser();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_verify_misses_a_store_of_a_finished_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run[/b]"  # A name that rich would take for markup.
    shutil.copytree(run_folder, run)
    assert main(["prepare", "--verify", str(run)]) == 0
    assert str(run) in capsys.readouterr().out
    shutil.rmtree(run / "valid")
    assert main(["prepare", "--verify", str(run)]) == 2
    assert "there is no such folder" in capsys.readouterr().out


def test_a_summary_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({"target": "model[/b]"}, Path("run[/b]"))
    shown = capsys.readouterr().out
    assert "prepared run[/b]" in shown
    assert "model[/b]" in shown


def test_lengths_at_which_rope_changes_are_refused_before_the_text_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models--a--b" / "snapshots" / "0a67"
    random_target("phi3").save_pretrained(target)
    (tmp_path / "text.txt").write_text("x = 1\n")
    command = ["prepare", "--target", str(target), "--text", str(tmp_path / "text.txt")]
    command += ["--output", str(tmp_path / "run"), "--batch-tokens", "100"]
    for options, line in (
        (["--sequence-length", "101"], "give --batch-tokens 101, or cut with --sequence-length"),
        (["--regenerate", "--sequence-length", "60"], "give at most 64 in both together"),
        # Of a sequence that fits, the tokenizer is asked next: there is none.
        (["--sequence-length", "100"], "the tokenizer of"),
        (["--sequence-length", "101", "--tokens-only"], "the tokenizer of"),
    ):
        assert main([*command, *options]) == 2
        assert line in capsys.readouterr().err
    recipe = FolderRecipe(target, [])
    assert recipe.options()["target"] == "a/b@0a67"
