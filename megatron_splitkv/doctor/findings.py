"""One line of the doctor's report, and the report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # absent or different, and nothing that is needed depends on it
    WARNING = "warning"  # works, but worse than it could
    PROBLEM = "problem"  # something that is needed, or was installed to be used, does not work


@dataclass(frozen=True)
class Finding:
    """What is the case with one subject.

    Args:
        area: the part of the report that it belongs to.
        subject: what was looked at.
        status: how bad it is.
        detail: what is the case.
        fix: what to do; every problem has one.
    """

    area: str
    subject: str
    status: Status
    detail: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if self.status is Status.PROBLEM and not self.fix:
            raise ValueError(f"the problem of {self.subject} comes without a fix")


@dataclass(frozen=True)
class Diagnosis:
    """The whole report.

    Args:
        findings: in the order in which they are shown.
        facts: what the checks saw, for programs: versions, devices, kernels and so on by name.
    """

    findings: Sequence[Finding]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Whether there is no problem."""
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as what `json` can write."""
        return {
            "healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts,
        }
