"""Sections of a long check: each is recorded as it ends, and none takes the others with it."""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, SKIPPED, LATE = "ok", "failed", "skipped", "not begun"


class Skip(Exception):
    """A section that has nothing to do here, with the reason."""


class Failure(Exception):
    """A section that ran and found something wrong; `values` is what it measured."""

    def __init__(self, message: str, values: dict[str, Any]) -> None:
        super().__init__(message)
        self.values = values


@dataclass
class Report:
    """A JSON file and its Markdown twin that grow section by section.

    A section of an earlier run is taken over if it was ok and the environment was the same; what
    failed, was skipped or ran elsewhere runs again.

    Args:
        path: the JSON file; the Markdown file lies beside it.
        environment: device and versions.
        deadline: `time.monotonic()` after which no section starts.
    """

    path: Path
    environment: dict[str, Any]
    deadline: float
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            if earlier.get("environment") == self.environment:
                self.sections = {
                    name: section
                    for name, section in earlier["sections"].items()
                    if section["status"] == OK
                }

    def run(self, name: str, section: Callable[[], dict[str, Any]]) -> None:
        """Run a section unless it is there; whatever it raises is recorded.

        Args:
            name: of the section.
            section: returns what it measured; raises `Skip` or `Failure`.
        """
        if name in self.sections:
            print(f"{name}: taken over from an earlier run")
            return
        begin = time.monotonic()
        record: dict[str, Any]
        try:
            if begin > self.deadline:
                record = {
                    "status": LATE,
                    "reason": "no time was left; run the same command again to go on",
                }
            else:
                record = {"status": OK, "values": section()}
        except Skip as reason:
            record = {"status": SKIPPED, "reason": str(reason)}
        except Failure as failure:
            record = {"status": FAILED, "reason": str(failure), "values": failure.values}
        except Exception as error:
            record = {
                "status": FAILED,
                "reason": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        record["seconds"] = round(time.monotonic() - begin, 2)
        self.sections[name] = record
        print(f"{name}: {record['status']} {record.get('reason', '')}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        """Write both files; each is whole or as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {"environment": self.environment, "sections": self.sections}
        _replace(self.path, json.dumps(values, indent=1) + "\n")
        _replace(self.path.with_suffix(".md"), "\n".join(self._markdown()) + "\n")

    @property
    def late(self) -> list[str]:
        """Names of sections that found no time."""
        return [name for name, s in self.sections.items() if s["status"] == LATE]

    @property
    def failed(self) -> list[str]:
        """Names of failed sections."""
        return [name for name, s in self.sections.items() if s["status"] == FAILED]

    def _markdown(self) -> Iterator[str]:
        yield "# Acceptance on one device\n"
        yield f"{len(self.sections)} sections, {len(self.failed)} failed.\n"
        yield from (f"- {name}: {value}" for name, value in self.environment.items())
        groups: dict[str, dict[str, dict[str, Any]]] = {}
        for name, section in self.sections.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = section
        for group, members in groups.items():
            columns = list(dict.fromkeys(k for s in members.values() for k in s.get("values", {})))
            yield f"\n## {group}\n"
            yield _row(["", "status", *columns, "remark"])
            yield _row(["---"] * (len(columns) + 3))
            for name, section in members.items():
                cells = [_text(section.get("values", {}).get(column, "")) for column in columns]
                remark = section.get("reason", "").replace("|", "\\|").replace("\n", " ")
                yield _row([name, section["status"], *cells, remark])


@contextmanager
def nvtx_range(name: str, enabled: bool) -> Iterator[None]:
    """A named range for profilers, where the device is a GPU."""
    if not enabled:
        yield
        return
    import torch

    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text)
    os.replace(aside, path)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
