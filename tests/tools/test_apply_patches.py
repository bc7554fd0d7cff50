"""The patches fit the releases they name and do what they say; `apply_patches` leaves no traces."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.attention.te_stub import wheel_of

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/apply_patches.py"
MEGATRON_TAGS = ("core_v0.18.2", "core_v0.19.2")
TE_TAGS = {"v2.13": "2.13.0", "v2.20.2": "2.20.2"}
ATTENTION = "megatron/core/transformer/attention.py"
ARGUMENTS = "megatron/training/arguments.py"


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("apply_patches", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()
INSTALLED = tool.find_root("megatron-lm")


def apply(upstream: str, root: Path, *options: str, code: int = 0) -> str:
    """Run the tool as a user does; its output, or its one line of error."""
    done = subprocess.run(
        [sys.executable, str(TOOL), upstream, "--root", str(root), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    output = done.stderr if code else done.stdout
    assert output.count("\n") == 1, output
    return output


def contents(root: Path) -> dict[str, bytes]:
    """Every source file below a folder; also what the tool might have left behind."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def copy_of_megatron(tag: str, folder: Path) -> Path:
    """The installed sources if they are of that tag, else those of its wheel."""
    version = tag.removeprefix("core_v")
    if tool.version_of("megatron-lm", INSTALLED) == version:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(INSTALLED / "megatron", folder / "megatron", ignore=ignored)
        return folder
    wheels = Path(sys.prefix, "wheels")
    found = list(wheels.glob(f"megatron_core-{version}-*.whl"))
    if not found:
        pytest.skip(f"no megatron_core-{version} in {wheels}: tools/environment.sh downloads it")
    with zipfile.ZipFile(found[0]) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module", params=MEGATRON_TAGS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources that no test of this module changes."""
    return copy_of_megatron(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """What the tool reads of the installed megatron-core, to be changed at will."""
    for name in (ATTENTION, ARGUMENTS, "megatron/core/package_info.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(INSTALLED / name, tmp_path / name)
    yield tmp_path
    assert not list(tmp_path.glob(".apply_patches*"))


SMOKE = """
import sys
from megatron.core.transformer import attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
assert attention.__file__.startswith(sys.argv[1]), attention.__file__
assert "megatron_splitkv" not in sys.modules
from tests import stock_layer
print(type(stock_layer.core_attention_of(DotProductAttention)).__name__)
from megatron_splitkv import hooks
assert not hooks.enabled()
try:
    stock_layer.core_attention_of(DotProductAttention, "p2p")
except AssertionError as error:
    print(error)
import argparse
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser())
print([a.help for a in parser._actions if "--cp-comm-type" in a.option_strings])
"""


def test_megatron_patches_apply_work_and_come_off(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)

    assert "would apply 0001" in apply("megatron-lm", tmp_path, "--check")
    assert contents(tmp_path) == before
    assert ": applied 0001" in apply("megatron-lm", tmp_path)
    patched = contents(tmp_path)
    changed = {name for name, content in patched.items() if before[name] != content}
    assert changed == {ATTENTION, ARGUMENTS}
    assert patched.keys() == before.keys()

    search = f"{tmp_path}{os.pathsep}{ROOT}"
    smoke = subprocess.run(
        [sys.executable, "-c", SMOKE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert smoke.returncode == 0, smoke.stderr[-3000:]
    lines = smoke.stdout.splitlines()
    assert lines[-3] == "SplitKVCoreAttention"
    assert "only supported by TEDotProductAttention" in lines[-2]
    assert "splitkv of the package megatron-splitkv" in lines[-1]

    assert "every patch is applied" in apply("megatron-lm", tmp_path)
    assert "would take back" in apply("megatron-lm", tmp_path, "--reverse", "--check")
    assert contents(tmp_path) == patched
    assert "took back 0001" in apply("megatron-lm", tmp_path, "--reverse")
    assert contents(tmp_path) == before
    assert "no patch is applied" in apply("megatron-lm", tmp_path, "--reverse")


@pytest.mark.parametrize("tag", TE_TAGS)
def test_transformer_engine_patches_apply_work_and_come_off(tag: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of(TE_TAGS[tag])) as wheel:
        wheel.extractall(tmp_path)
    before = contents(tmp_path)
    assert f"{tag} in {tmp_path}: applied" in apply("transformer-engine", tmp_path)
    (name,) = (name for name, content in contents(tmp_path).items() if before[name] != content)

    # The module needs a GPU build: its constructor is run up to what the patch adds.
    def is_added(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == "cp_comm_type == 'splitkv'"

    (attention,) = (
        node
        for node in ast.parse((tmp_path / name).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    )
    (constructor,) = (n for n in attention.body if getattr(n, "name", "") == "__init__")
    (added,) = (node for node in ast.walk(constructor) if is_added(node))
    code = compile(ast.Module([added], []), name, "exec")
    exec(code, {"cp_comm_type": "p2p"})
    with pytest.raises(ValueError, match=r"megatron-splitkv.*enable\(\).*SplitKVCoreAttention"):
        exec(code, {"cp_comm_type": "splitkv"})

    apply("transformer-engine", tmp_path, "--reverse")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("upstream", ["megatron-lm", "transformer-engine"])
def test_headers_say_what_why_and_when_to_drop(upstream: str) -> None:
    for tag in tool.known_tags(upstream):
        patches = sorted((tool.PATCHES / upstream / tag).glob("*.patch"))
        assert patches
        for patch in patches:
            header = patch.read_text().split("\n--- a/")[0]
            assert f", tag {tag}\n" in header
            for field in ("Upstream:", "Adds:", "Why:", "Drop:"):
                assert f"\n{field}" in header, (patch, field)


def test_a_fork_whose_lines_moved_is_patched_at_the_right_place(small: Path) -> None:
    for name in (ATTENTION, ARGUMENTS):
        path = small / name
        path.write_text("# ours\n# and more of ours\n" + path.read_text())
    before = contents(small)
    apply("megatron-lm", small)
    source = (small / ATTENTION).read_text()
    assert source.startswith("# ours\n")
    assert "core_attention_for(core_attention, cp_comm_type)" in source
    apply("megatron-lm", small, "--reverse")
    assert contents(small) == before


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("applied", [ATTENTION, ARGUMENTS])
def test_partial_application_is_told_and_left(small: Path, applied: str, reverse: bool) -> None:
    originals = contents(small)
    apply("megatron-lm", small)
    for name in originals.keys() - {applied}:
        (small / name).write_bytes(originals[name])
    before = contents(small)
    options = ("--reverse",) if reverse else ()
    assert f"is partly applied (only {applied}:" in apply("megatron-lm", small, *options, code=2)
    assert contents(small) == before


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_file_that_does_not_fit_leaves_all_files_alone(small: Path, check: tuple[str]) -> None:
    path = small / ARGUMENTS  # the second of the two
    path.write_text(path.read_text().replace("p2p, a2a, allgather or", "p2p, a2a or"))
    before = contents(small)
    assert f"does not fit: {ARGUMENTS}:" in apply("megatron-lm", small, *check, code=2)
    assert contents(small) == before


def test_an_unknown_version_is_refused_unless_a_tag_is_named(small: Path) -> None:
    info = small / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MAJOR = 0", "MAJOR = 7"))
    message = apply("megatron-lm", small, code=2)
    assert "no patches for megatron-lm 7." in message
    assert "known tags: core_v0.18.2, core_v0.19.2" in message
    installed = f"core_v{tool.version_of('megatron-lm', INSTALLED)}"
    assert f"{installed} in {small}: applied" in apply("megatron-lm", small, "--tag", installed)
    assert "--tag v1 is not known; choose one of: core_v0" in apply(
        "megatron-lm", small, "--tag", "v1", code=2
    )


@pytest.mark.parametrize("upstream", ["megatron-lm", "transformer-engine"])
def test_a_folder_without_the_package_is_named(upstream: str, tmp_path: Path) -> None:
    assert f"{tmp_path} holds no" in apply(upstream, tmp_path, code=2)


def test_versions_of_checkouts_and_wheels(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "build_tools").mkdir()
    (tmp_path / "build_tools/VERSION.txt").write_text("2.13.0.dev0\n")
    # A companion of another version beside it does not count.
    (tmp_path / "transformer_engine_cu12-2.8.0.dist-info").mkdir()
    assert tool.version_of("transformer-engine", tmp_path) == "2.13.0.dev0"
    assert tool.tag_for("transformer-engine", "2.13.0.dev0") == "v2.13"
    (tmp_path / "transformer_engine-2.20.2.dist-info").mkdir()
    assert tool.version_of("transformer-engine", tmp_path) == "2.20.2"


def test_a_failure_half_way_restores_every_file(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(small)
    modes = {name: (small / name).stat().st_mode for name in before}
    replace, calls = os.replace, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("No space left on device")
        replace(source, target)

    monkeypatch.setattr(tool.os, "replace", failing)
    tag = f"core_v{tool.version_of('megatron-lm', INSTALLED)}"
    with pytest.raises(OSError, match="No space left"):
        tool.run("megatron-lm", small, tag, check=False, reverse=False)
    assert len(calls) > 2  # it came to a second file, and went back
    assert contents(small) == before
    assert {name: (small / name).stat().st_mode for name in before} == modes


def test_hard_links_are_cut_and_modes_kept(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache.py"
    os.link(small / ATTENTION, cache)
    before = cache.read_bytes()
    cache.chmod(0o640)
    apply("megatron-lm", small)
    assert (small / ATTENTION).stat().st_mode & 0o777 == 0o640
    assert cache.read_bytes() == before
    assert (small / ATTENTION).read_bytes() != before


PATCH = """prose
--- a/p/a.py
+++ b/p/a.py
@@ -1,3 +1,4 @@
 one = 1

+two = 2
 three = 3
@@ -10 +11 @@
-ten = 0
+ten = 10
"""


def _write_patch(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "x.patch"
    file.write_text(text)
    return file


def test_patches_are_read_and_turned_round(tmp_path: Path) -> None:
    first, second = hunks = tool.read_patch(_write_patch(tmp_path, PATCH))
    assert first.old == [b"one = 1\n", b"\n", b"three = 3\n"]
    assert first.new == [b"one = 1\n", b"\n", b"two = 2\n", b"three = 3\n"]
    assert (second.old_line, second.new_line, second.old) == (9, 10, [b"ten = 0\n"])
    # The second change is found by its number, forth and back: its lines are there twice.
    rest = [b"%d\n" % i for i in range(4, 10)]
    before = [b"one = 1\n", b"\n", b"three = 3\n", *rest, b"ten = 0\n", b"ten = 0\n", b"ten = 10\n"]
    files = {"p/a.py": before}
    tool.apply(hunks, files, "x")
    assert files["p/a.py"][3:] == [
        b"three = 3\n",
        *rest,
        b"ten = 10\n",
        b"ten = 0\n",
        b"ten = 10\n",
    ]
    tool.apply([h.reversed() for h in hunks], files, "x")
    assert files["p/a.py"] == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prose only\n", "holds no changes"),
        (PATCH.replace("+ten = 10\n", ""), "line 10 of p/a.py is cut short"),
        (PATCH.replace("p/a.py", "../a.py"), "outside of the package"),
    ],
)
def test_bad_patches_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(tool.PatchError, match=message):
        tool.read_patch(_write_patch(tmp_path, text))
