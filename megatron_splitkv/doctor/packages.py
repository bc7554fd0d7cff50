"""Versions: Python, torch, Megatron, Transformer Engine, apex and what they need."""

import sys
from typing import Any

from megatron_splitkv.doctor.findings import Finding, Status
from megatron_splitkv.doctor.probe import Answer

AREA = "packages"
_PYTHON = ((3, 12), (3, 14))  # from, up to but not including
_OLDEST = {
    "torch": (2, 8),
    "numpy": (1, 26),
    "safetensors": (0, 5),
    "transformer-engine": (2, 8),
}
_INSTALL = {
    "megatron-core": "pip install 'megatron-core>=0.18.2,<0.20'",
    "transformer-engine": "pip install 'megatron-splitkv[gpu]'",
}

# What Megatron uses apex for, and what one gains. For the first two Megatron prefers Transformer
# Engine where there is one.
APEX_PARTS = {
    "FusedAdam": "Adam over all parameters in a few launches instead of one for each",
    "multi-tensor operations": "gradient norm, clipping and copies likewise",
    "norms": "LayerNorm of --transformer-impl local; drafters have RMSNorm and gain nothing",
    "gradient accumulation fusion": "--gradient-accumulation-fusion, which drafters leave off",
}
_ALSO_OF_TRANSFORMER_ENGINE = ("FusedAdam", "multi-tensor operations")
_REBUILD_APEX = (
    "build it from github.com/NVIDIA/apex with its C++ and CUDA extensions (`pip install apex` is "
    "another package), or uninstall it"
)


def python_finding() -> Finding:
    """The interpreter."""
    oldest, unknown = _PYTHON
    version = ".".join(map(str, sys.version_info[:3]))
    if oldest <= sys.version_info[:2] < unknown:
        return Finding(AREA, "python", Status.OK, version)
    return Finding(
        AREA,
        "python",
        Status.PROBLEM,
        f"{version} is not supported",
        f"use Python {_dotted(oldest)} up to, not including, {_dotted(unknown)}",
    )


def version_findings(environment: dict[str, Any]) -> list[Finding]:
    """What must be there besides Megatron.

    Args:
        environment: the answer of `inspections.environment`.
    """
    versions = {"torch": environment["torch"]["version"], **environment["packages"]}
    findings = [_versioned(name, versions[name]) for name in ("torch", "numpy", "safetensors")]
    if versions["psutil"] is None:
        findings.append(
            Finding(
                AREA,
                "psutil",
                Status.PROBLEM,
                "absent; Megatron's checkpoint writer needs it",
                "pip install psutil",
            )
        )
    else:
        findings.append(Finding(AREA, "psutil", Status.OK, versions["psutil"]))
    if versions["triton"] is None:
        has_gpu = bool(environment["devices"])
        findings.append(
            Finding(
                AREA,
                "triton",
                Status.PROBLEM if has_gpu else Status.NOTE,
                "absent; Megatron's and torch's compiled kernels need it on a GPU",
                "pip install triton",
            )
        )
    else:
        findings.append(Finding(AREA, "triton", Status.OK, versions["triton"]))
    return findings


def _versioned(name: str, version: str | None) -> Finding:
    oldest = _OLDEST[name]
    if version is None or _release(version) < oldest:
        found = "absent" if version is None else f"{version} is too old"
        fix = _INSTALL.get(name, f"pip install '{name}>={_dotted(oldest)}'")
        return Finding(AREA, name, Status.PROBLEM, found, fix)
    return Finding(AREA, name, Status.OK, version)


def megatron_findings(answer: Answer, has_gpu: bool) -> list[Finding]:
    """Megatron-core, and whose optimizer it takes.

    Args:
        answer: of `inspections.megatron`.
        has_gpu: whether a fused optimizer would have something to run on.
    """
    facts = answer.facts
    fix = _INSTALL["megatron-core"]
    if refused := facts.get("refused"):
        what, _, how = refused.partition("; ")
        return [Finding(AREA, "megatron-core", Status.PROBLEM, what, how or fix)]
    if error := answer.failure or facts.get("error"):
        if culprit := facts.get("culprit"):
            fix = f"repair or uninstall {culprit}: Megatron imports it if it is there"
        detail = f"it cannot be imported: {error}"
        return [Finding(AREA, "megatron-core", Status.PROBLEM, detail, fix)]
    # Behind the + is the commit of whatever repository Megatron's files lie in.
    version = facts["version"].partition("+")[0]
    findings = [Finding(AREA, "megatron-core", Status.OK, f"{version} is supported")]
    sources = {"transformer_engine": "Transformer Engine's", "apex": "apex's"}
    if owner := sources.get(facts["optimizer"].split(".")[0]):
        detail = f"Megatron takes {owner} fused Adam"
        return [*findings, Finding(AREA, "optimizer", Status.OK, detail)]
    detail = "Megatron takes torch's AdamW: no fused one can be imported"
    if has_gpu:
        fix = _INSTALL["transformer-engine"]
        return [*findings, Finding(AREA, "optimizer", Status.WARNING, detail, fix)]
    return [*findings, Finding(AREA, "optimizer", Status.NOTE, detail)]


def transformer_engine_finding(
    is_installed: bool, answer: Answer, devices: list[dict[str, Any]]
) -> Finding:
    """Transformer Engine.

    Args:
        is_installed: whether there is such a package.
        answer: of `inspections.transformer_engine`, if it is.
        devices: the GPUs.
    """
    name, install = "transformer-engine", _INSTALL["transformer-engine"]
    if not is_installed:
        if any(tuple(device["capability"]) >= (9, 0) for device in devices):
            detail = "absent; its attention is the fastest on this GPU, its Adam a fused one"
            return Finding(AREA, name, Status.WARNING, detail, install)
        return Finding(AREA, name, Status.NOTE, "absent; nothing needs it here")
    version = answer.facts.get("version")
    if version is not None and _release(version) < _OLDEST[name]:
        oldest = _dotted(_OLDEST[name])
        return Finding(
            AREA, name, Status.PROBLEM, f"{version} is too old; {oldest} is the first", install
        )
    shown = version or "an unknown version"
    if error := answer.failure or answer.facts.get("error"):
        detail = f"{shown} cannot be imported: {error}"
        fix = (
            f"{install} built for this torch and CUDA, or, without an NVIDIA GPU, pip uninstall "
            "transformer-engine"
        )
        return Finding(AREA, name, Status.PROBLEM, detail, fix)
    if refused := answer.facts.get("refused"):
        return Finding(AREA, name, Status.PROBLEM, f"{shown}: {refused}", install)
    return Finding(AREA, name, Status.OK, shown)


def apex_findings(
    is_installed: bool, answer: Answer, has_transformer_engine: bool, optimizer: str
) -> list[Finding]:
    """Apex, part by part: what Megatron would use and what that gains.

    Args:
        is_installed: whether there is such a package.
        answer: of `inspections.apex`, if it is.
        has_transformer_engine: whether one can be imported.
        optimizer: the Adam that Megatron takes, by its full name; empty if Megatron fails.
    """
    gained = " and ".join(_ALSO_OF_TRANSFORMER_ENGINE)
    if not is_installed:
        detail = (
            f"absent and not needed: Transformer Engine has the same {gained}"
            if has_transformer_engine
            else f"absent; Megatron would use its {gained}: the same results in fewer launches"
        )
        return [Finding(AREA, "apex", Status.NOTE, detail)]
    if answer.failure:
        detail = f"it cannot be imported: {answer.failure}"
        return [Finding(AREA, "apex", Status.PROBLEM, detail, _REBUILD_APEX)]
    return [
        _apex_part(part, error, has_transformer_engine, optimizer)
        for part, error in answer.facts["parts"].items()
    ]


def _apex_part(
    part: str, error: str | None, has_transformer_engine: bool, optimizer: str
) -> Finding:
    subject, gain = f"apex: {part}", APEX_PARTS[part]
    is_ours = part in _ALSO_OF_TRANSFORMER_ENGINE
    if error is None:
        used = "present; Transformer Engine's is taken" if has_transformer_engine else "present"
        return Finding(AREA, subject, Status.OK, f"{used if is_ours else 'present'} ({gain})")
    detail = f"does not work: {error}"
    if part == "FusedAdam" and optimizer.startswith("apex."):
        # Megatron could import its Python and takes it; what is compiled is missed when it runs.
        detail = f"Megatron takes it and it {detail}"
        return Finding(AREA, subject, Status.PROBLEM, detail, _REBUILD_APEX)
    if is_ours and not has_transformer_engine:
        return Finding(AREA, subject, Status.WARNING, f"{detail} ({gain})", _REBUILD_APEX)
    return Finding(AREA, subject, Status.NOTE, f"{detail}; not needed ({gain})")


def _release(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
