"""The package's rooms may import downward only, and each says what it may stand on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_splitkv

PACKAGE = Path(megatron_splitkv.__file__).parent

# A room may import rooms of a smaller level, and itself.
LEVELS = {
    "config": 0,
    "compat": 1,
    "cpu": 1,
    "data": 2,
    "plan": 3,
    "comm": 3,
    "batch": 4,
    "attention": 4,
    "hooks": 5,
    "gpt_specs": 5,
    "testing": 5,
    "loss": 5,
    "drafter": 6,
    "bench": 7,
    "online": 7,
    "export": 7,
    "evaluate": 7,
    "scale": 7,
    "train": 8,
    "doctor": 8,
    "cli": 9,
    "pretrain_dflash": 9,
    "recipes": 9,
    "__main__": 10,
}
WITHOUT_MEGATRON = ("config", "data", "plan", "comm", "batch", "loss", "evaluate", "scale")


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] != "megatron_splitkv" or len(parts) < 2 or parts[1] not in LEVELS:
            continue
        target = parts[1]
        allowed = target == room or LEVELS[target] < LEVELS[room]
        assert allowed, f"{room} must not import {target}: {path} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_rooms_that_need_it_import_megatron(path: Path) -> None:
    if room_of(path) in WITHOUT_MEGATRON:
        assert not [n for n in imported_modules(path) if n.split(".")[0] == "megatron"], path


def test_only_recipes_and_one_file_of_export_import_bridge() -> None:
    importers = {
        path
        for path in sources()
        if any(name.startswith("megatron.bridge") for name in imported_modules(path))
    }
    elsewhere = {path for path in importers if room_of(path) != "recipes"}
    assert elsewhere == {PACKAGE / "export" / "bridge.py"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_compat_looks_at_versions_and_signatures(path: Path) -> None:
    if room_of(path) == "compat":
        return
    looks = {"importlib.metadata", "packaging", "packaging.version", "inspect"}
    assert not looks & imported_modules(path), f"{path}: versions and signatures belong in compat"


def test_every_room_has_a_level() -> None:
    assert {room_of(p) for p in sources()} <= set(LEVELS)


def test_files_stay_one_idea_long() -> None:
    too_long = {
        str(p.relative_to(PACKAGE)): n
        for p in sources()
        if (n := len(p.read_text().splitlines())) > 350
    }
    assert not too_long


IMPORT_PROBE = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import megatron_splitkv
seconds = time.perf_counter() - start
heavy = "megatron.core megatron.training transformer_engine apex transformers matplotlib".split()
loaded = set(heavy) & (set(sys.modules) - before)
assert not loaded, loaded
assert seconds < 2.0, seconds
"""


def test_import_is_light_and_patches_nothing() -> None:
    """Neither Transformer Engine, apex, triton nor a GPU is needed: hidden, if they are there."""
    missing = ["transformer_engine", "apex", "triton"]
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
    subprocess.run([sys.executable, "-c", hidden + IMPORT_PROBE], check=True, timeout=300)
