"""A misspelt option ends a command with one line that names it and what is close to it."""

import argparse

import pytest

from megatron_splitkv import cli
from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError, refuse_unknown_options


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # What argparse would rather say, that others are missing, comes second.
        ("evaluate --drfter x", "splitkv evaluate: unknown option --drfter (closest: --drafter)"),
        ("plan --step=1 --tile", None),
        ("plan --documets=4", "splitkv plan: unknown option --documets (closest: --documents)"),
        (
            "bench step --contextss 6 --foo-bar",
            "splitkv bench step: unknown options --contextss (closest: --contexts), "
            "--foo-bar (closest: none)",
        ),
        ("doctor -jsn", "splitkv doctor: unknown option -jsn (closest: --json)"),
    ],
)
def test_one_line(
    words: str,
    line: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_splitkv.cli.plan.run", lambda args: 0)
    assert main(words.split()) == (0 if line is None else 2)
    expected = "" if line is None else f"{line}; --help lists all\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("words", ["", "--versoin", "evalute --x", "bench stp --x", "bench"])
def test_without_a_command_argparse_says_what_is_missing(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.startswith("usage: splitkv")


def test_every_option_of_every_command_is_known() -> None:
    """Long options, their unique beginnings and --no- forms pass, as argparse takes them."""
    seen = 0
    pending = [((), cli.build_parser())]
    while pending:
        words, parser = pending.pop()
        for action in parser._actions:
            if isinstance(action.choices, dict):
                pending += [((*words, name), inner) for name, inner in action.choices.items()]
            elif words:
                refuse_unknown_options(parser, action.option_strings)
                seen += len(action.option_strings)
    assert seen > 150


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--learning-rate", "-1e-3", "-5"], None),  # negative numbers are values
        (["--text=--layer"], None),
        (["--text", "--a b", "-a b"], None),  # values to argparse, since an option has no space
        (["--", "--layer"], None),
        (["-ofile", "-o", "file"], None),
        (["--layer", "--help"], None),  # help is printed
        (["--layer", "-h"], None),
        (["--layers=3"], None),
        (["--layer=3"], "--layer"),
        (["--text", "--layerz"], "--layerz"),
        (["-layers"], "-layers"),
    ],
)
def test_what_is_no_option_passes(words: list[str], refused: str | None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--layers", "--learning-rate", "--text", "-o"):
        parser.add_argument(option)
    if refused is None:
        refuse_unknown_options(parser, words)
        return
    with pytest.raises(ConfigError, match=rf"^unknown option {refused} \(closest: --layers"):
        refuse_unknown_options(parser, words)


def test_abbreviations_pass_where_argparse_takes_them() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers")
    refuse_unknown_options(parser, ["--lay", "3"])
    with pytest.raises(ConfigError, match="--ayers"):
        refuse_unknown_options(parser, ["--ayers", "3"])
