#!/usr/bin/env python3
"""Apply the text patches in patches/ to a Megatron or Transformer Engine, or take them back.

    python tools/apply_patches.py megatron-lm --check            # says what would be done
    python tools/apply_patches.py megatron-lm                    # the installed megatron-core
    python tools/apply_patches.py megatron-lm --root ~/my-fork   # a checkout
    python tools/apply_patches.py megatron-lm --reverse

Nothing in megatron-splitkv needs them; patches/README.md says whom they are for. All files of a run
change or none does. Needs nothing but Python, and imports nothing of what it patches.
"""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """Why nothing was changed, in one line."""


@dataclass(frozen=True)
class Hunk:
    """One contiguous change.

    Args:
        path: of the file, below the root.
        old_line: where `old` begins before the change, from 0.
        new_line: where `new` begins after the change.
        old: lines before, with their context.
        new: lines after.
    """

    path: str
    old_line: int
    new_line: int
    old: list[bytes]
    new: list[bytes]

    def reversed(self) -> "Hunk":
        return Hunk(self.path, self.new_line, self.old_line, self.new, self.old)


# Where an upstream is, and which version


def find_root(upstream: str) -> Path:
    """The folder that holds the installed package."""
    module = {"megatron-lm": "megatron.core", "transformer-engine": "transformer_engine"}[upstream]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise PatchError(f"{upstream} is not installed in {sys.prefix}; name a folder with --root")
    return Path(spec.origin).parents[len(module.split("."))]


def version_of(upstream: str, root: Path) -> str:
    """The version of the sources in `root`, read and not imported."""
    if upstream == "megatron-lm":
        info = root / "megatron/core/package_info.py"
        if info.is_file():
            parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.M))
            if len(parts) == 3:
                return "{MAJOR}.{MINOR}.{PATCH}".format(**parts)
        raise PatchError(f"{root} holds no megatron-core (megatron/core/package_info.py)")
    if (root / "transformer_engine").is_dir():
        for wheel in sorted(root.glob("transformer_engine-*.dist-info")):
            return wheel.name.removesuffix(".dist-info").split("-")[1]
        checkout = root / "build_tools/VERSION.txt"
        if checkout.is_file():
            return checkout.read_text().strip()
    raise PatchError(
        f"{root} holds no Transformer Engine (transformer_engine/ with its dist-info or "
        "build_tools/VERSION.txt)"
    )


def tag_for(upstream: str, version: str) -> str:
    """The folder of patches that are for this version."""
    tags = known_tags(upstream)
    for tag in tags:
        if _release(tag) == _release(version):
            return tag
    raise PatchError(
        f"there are no patches for {upstream} {version}; known tags: {', '.join(tags)} (a fork of "
        "one of them: name it with --tag)"
    )


def known_tags(upstream: str) -> list[str]:
    return sorted((p.name for p in (PATCHES / upstream).iterdir() if p.is_dir()), key=_release)


def _release(name: str) -> tuple[int, ...]:
    """``v2.13`` and ``2.13.0`` -> (2, 13, 0)."""
    numbers = re.search(r"\d+(\.\d+)*", name)
    release = [int(n) for n in numbers[0].split(".")] if numbers else []
    return tuple([*release, 0, 0, 0][:3])


# Patches, and how far they are applied


def read_patch(file: Path) -> list[Hunk]:
    """The changes of a unified diff; what stands before its first file is prose."""
    hunks: list[Hunk] = []
    path: str | None = None
    lines = iter(file.read_bytes().splitlines(keepends=True))
    for line in lines:
        if line.startswith(b"+++ b/"):
            path = line[len(b"+++ b/") :].strip().decode()
            if ".." in Path(path).parts:
                raise PatchError(f"{file}: {path} is outside of the package")
        elif path is not None and (match := _HUNK.match(line)):
            old_line, old_count, new_line, new_count = (int(n or 1) for n in match.groups())
            old, new = _read_hunk(lines, old_count, new_count)
            if (len(old), len(new)) != (old_count, new_count):
                raise PatchError(f"{file}: the change at line {old_line} of {path} is cut short")
            hunks.append(Hunk(path, old_line - 1, new_line - 1, old, new))
    if not hunks:
        raise PatchError(f"{file} holds no changes")
    return hunks


def _read_hunk(
    lines: Iterator[bytes], old_count: int, new_count: int
) -> tuple[list[bytes], list[bytes]]:
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        line = next(lines, b"")
        if line[:1] not in (b" ", b"-", b"+", b"\n") or not line:
            break
        content = line if line == b"\n" else line[1:]  # editors strip blank context lines
        if line[:1] != b"+":
            old.append(content)
        if line[:1] != b"-":
            new.append(content)
    return old, new


def find(lines: list[bytes], block: list[bytes], expected: int) -> int | None:
    """Where `block` begins: where it is expected, or else at the only other place."""
    if lines[expected : expected + len(block)] == block:
        return expected
    places = [i for i in range(len(lines) - len(block) + 1) if lines[i : i + len(block)] == block]
    return places[0] if len(places) == 1 else None


def is_applied(hunks: list[Hunk], files: Mapping[str, list[bytes]], name: str) -> bool:
    """Whether all changes of a patch are in the files; False: none of them is.

    Raises:
        PatchError: some are, or the files are neither what it expects nor what it makes.
    """
    done = [find(files[h.path], h.new, h.new_line) is not None for h in hunks]
    if all(done):
        return True
    places = [f"{h.path}:{h.old_line + 1}" for h in hunks]
    if any(done):
        there = [place for place, is_done in zip(places, done, strict=True) if is_done]
        raise PatchError(
            f"{name} is partly applied (only {', '.join(there)}); restore the original files, by "
            "reinstalling the package or from version control, and try again"
        )
    for hunk, place in zip(hunks, places, strict=True):
        if find(files[hunk.path], hunk.old, hunk.old_line) is None:
            raise PatchError(f"{name} does not fit: {place} is not what it expects")
    return False


def apply(hunks: list[Hunk], files: dict[str, list[bytes]], name: str) -> None:
    """Make the changes, in memory."""
    for hunk in hunks:  # in the order of the file: where the next one lands counts these
        lines = files[hunk.path]
        at = find(lines, hunk.old, hunk.new_line)
        if at is None:
            raise PatchError(f"{name} does not fit {hunk.path}:{hunk.old_line + 1}")
        files[hunk.path] = lines[:at] + hunk.new + lines[at + len(hunk.old) :]


# Files


def read_files(root: Path, paths: set[str]) -> dict[str, list[bytes]]:
    missing = sorted(path for path in paths if not (root / path).is_file())
    if missing:
        raise PatchError(f"{root} has no {', '.join(missing)}")
    return {path: (root / path).read_bytes().splitlines(keepends=True) for path in sorted(paths)}


def write_files(root: Path, contents: Mapping[str, bytes]) -> None:
    """Put all files in place, or leave all as they were.

    New contents are written beside the package and renamed, so a file is never half there, and
    one that shares its bytes with an installer's cache by a hard link does not change the cache.
    """
    for path, content in contents.items():
        compile(content, path, "exec")  # a broken file must not even be written
    with tempfile.TemporaryDirectory(prefix=".apply_patches-", dir=root) as folder:
        moves = []
        for i, (path, content) in enumerate(contents.items()):
            target, new, kept = root / path, Path(folder, f"{i}.new"), Path(folder, f"{i}.kept")
            new.write_bytes(content)
            shutil.copymode(target, new)
            shutil.copy2(target, kept)
            moves.append((target, new, kept))
        moved = []
        try:
            for target, new, kept in moves:
                moved.append((target, kept))
                os.replace(new, target)
        except BaseException:
            for target, kept in moved:
                os.replace(kept, target)
            raise


# The command


def run(upstream: str, root: Path, tag: str, *, check: bool, reverse: bool) -> str:
    """Apply or take back the patches of a tag.

    Args:
        upstream: folder of `PATCHES`.
        root: folder that holds the package.
        tag: folder of `upstream`.
        check: change nothing.
        reverse: take back.

    Returns:
        What was done, or would be.
    """
    patches = [(p.name, read_patch(p)) for p in sorted((PATCHES / upstream / tag).glob("*.patch"))]
    before = read_files(root, {hunk.path for _, hunks in patches for hunk in hunks})
    after = dict(before)
    names = []
    for name, hunks in reversed(patches) if reverse else patches:
        if is_applied(hunks, after, name) == reverse:
            apply([h.reversed() for h in hunks] if reverse else hunks, after, name)
            names.append(name)
    where = f"{upstream} {tag} in {root}"
    if not names:
        return f"{where}: nothing to do, {'no' if reverse else 'every'} patch is applied"
    changed = {path: b"".join(x) for path, x in after.items() if x != before[path]}
    if not check:
        write_files(root, changed)
    verb = {
        (False, False): "applied",
        (False, True): "would apply",
        (True, False): "took back",
        (True, True): "would take back",
    }[reverse, check]
    return f"{where}: {verb} {', '.join(names)} ({', '.join(changed)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("upstream", choices=sorted(p.name for p in PATCHES.iterdir() if p.is_dir()))
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder with the package in it")
    parser.add_argument("--tag", help="use the patches of this tag, whatever the version says")
    parser.add_argument("--check", action="store_true", help="change nothing, say what would be")
    parser.add_argument("--reverse", action="store_true", help="take the patches back")
    args = parser.parse_args()
    try:
        root = args.root or find_root(args.upstream)
        tag = args.tag or tag_for(args.upstream, version_of(args.upstream, root))
        if tag not in known_tags(args.upstream):
            raise PatchError(
                f"--tag {tag} is not known; choose one of: {', '.join(known_tags(args.upstream))}"
            )
        print(run(args.upstream, root, tag, check=args.check, reverse=args.reverse))
    except (PatchError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
