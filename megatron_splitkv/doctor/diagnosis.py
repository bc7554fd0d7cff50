"""All checks in order, and what follows from what."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.doctor import machine, packages
from megatron_splitkv.doctor.findings import Diagnosis, Finding, Status
from megatron_splitkv.doctor.probe import Answer, run_inspection

# What a drafter of an 8B target asks attention for.
TYPICAL_HEADS, TYPICAL_KEY_HEADS, TYPICAL_WIDTH = 32, 8, 128
_DRIVER = Path("/proc/driver/nvidia/version")
_AT_ONCE = 2  # every inspection imports torch: more would only wait for each other


def diagnose(
    *,
    feature_stores: Sequence[Path] = (),
    checkpoints: Sequence[Path] = (),
    timeout: float = 120.0,
) -> Diagnosis:
    """Look at everything.

    Args:
        feature_stores: folders of feature stores to read whole.
        checkpoints: ``--save`` folders whose latest checkpoint to read.
        timeout: seconds that a single inspection may take.

    Raises:
        ConfigError: no such folder, or no such time.
    """
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout {timeout} must be more than 0 seconds, and finite")
    for path in (*feature_stores, *checkpoints):
        if not path.is_dir():
            raise ConfigError(f"there is no folder {path}; name an existing one")
    findings = [packages.python_finding()]
    environment = run_inspection("environment", timeout=timeout)
    if environment.failure:
        detail = f"it cannot be imported: {environment.failure}"
        fix = "pip install 'torch>=2.8'; nothing else can be looked at before"
        findings.append(Finding(packages.AREA, "torch", Status.PROBLEM, detail, fix))
        return Diagnosis(findings, {"environment": {}})
    seen = environment.facts
    answers = _inspect(seen, timeout)
    findings += packages.version_findings(seen)
    findings += _library_findings(seen, answers)
    findings += machine.device_findings(seen, has_driver=_DRIVER.exists())
    findings += machine.kernel_findings(answers["kernels"])
    findings += [
        machine.loopback_finding(backend, answers[backend])
        for backend in ("gloo", "nccl")
        if backend in answers
    ]
    facts: dict[str, Any] = {"environment": seen}
    facts |= {name: answer.facts or {"failure": answer.failure} for name, answer in answers.items()}
    findings += _storage_findings(feature_stores, checkpoints, facts)
    return Diagnosis(findings, facts)


def _inspect(environment: dict[str, Any], timeout: float) -> dict[str, Answer]:
    """Run what the machine has, some at a time."""
    num_devices = len(environment["devices"])
    shape = tuple(map(str, (TYPICAL_HEADS, TYPICAL_KEY_HEADS, TYPICAL_WIDTH)))
    wanted: dict[str, tuple[str, ...]] = {
        "megatron": ("megatron",),
        **{name: (name,) for name in environment["importable"]},
        "kernels": ("kernels", *shape),
        "gloo": ("loopback", "gloo", "2"),
    }
    if num_devices:
        wanted["nccl"] = ("loopback", "nccl", str(min(num_devices, 2)))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = {
            name: pool.submit(run_inspection, *call, timeout=timeout)
            for name, call in wanted.items()
        }
        return {name: future.result() for name, future in running.items()}


def _library_findings(environment: dict[str, Any], answers: dict[str, Answer]) -> list[Finding]:
    """Megatron and the two libraries that it imports where they are."""
    importable, absent = environment["importable"], Answer({})
    te = packages.transformer_engine_finding(
        "transformer_engine" in importable,
        answers.get("transformer_engine", absent),
        environment["devices"],
    )
    return [
        *packages.megatron_findings(answers["megatron"], bool(environment["devices"])),
        te,
        *packages.apex_findings(
            "apex" in importable,
            answers.get("apex", absent),
            has_transformer_engine=te.status is Status.OK,
            optimizer=answers["megatron"].facts.get("optimizer", ""),
        ),
    ]


def _storage_findings(
    feature_stores: Sequence[Path], checkpoints: Sequence[Path], facts: dict[str, Any]
) -> list[Finding]:
    from megatron_splitkv.doctor import storage  # imports torch

    findings: list[Finding] = []
    for path in feature_stores:
        finding, facts[f"feature store {path}"] = storage.store_finding(path)
        findings.append(finding)
    for path in checkpoints:
        found, facts[f"checkpoint {path}"] = storage.checkpoint_findings(path)
        findings += found
    return findings
