"""Ctrl-C ends a command in one line."""

import pytest

from megatron_splitkv.cli import main, scale


def test_one_line_and_the_shells_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(scale, "run", interrupt)
    assert main(["scale"]) == 130
    assert capsys.readouterr().err == "splitkv scale: interrupted\n"
