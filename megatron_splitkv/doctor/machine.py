"""The device, the attention kernels on it, and whether processes reach each other."""

import os
from collections.abc import Mapping
from typing import Any

from megatron_splitkv.doctor.findings import Finding, Status
from megatron_splitkv.doctor.probe import Answer

DEVICE, KERNELS, NETWORK = "device", "attention kernels", "communication"


def device_findings(
    environment: dict[str, Any], *, has_driver: bool, variables: Mapping[str, str] = os.environ
) -> list[Finding]:
    """GPUs, cuDNN, NCCL, and the variable that Megatron insists on.

    Args:
        environment: the answer of `inspections.environment`.
        has_driver: whether the system has an NVIDIA driver.
        variables: of the environment.
    """
    torch, devices = environment["torch"], environment["devices"]
    if not devices:
        if not has_driver:
            detail = "no NVIDIA GPU: training runs on the CPU with gloo"
            return [Finding(DEVICE, "GPU", Status.NOTE, detail)]
        if torch["cuda"] is None:
            detail = f"there is a driver, but torch {torch['version']} was built without CUDA"
            fix = "install a CUDA build of torch (PyPI's for Linux is one)"
        else:
            detail = f"there is a driver, but torch for CUDA {torch['cuda']} finds no GPU"
            fix = (
                "see `nvidia-smi`: a driver too old for this CUDA, CUDA_VISIBLE_DEVICES, or a "
                "container without GPUs"
            )
        return [Finding(DEVICE, "GPU", Status.PROBLEM, detail, fix)]
    findings = [
        Finding(
            DEVICE,
            f"GPU {i}",
            Status.OK,
            f"{device['name']}, compute capability {_dotted(device['capability'])}, "
            f"{device['gigabytes']:g} GB",
        )
        for i, device in enumerate(devices)
    ]
    if len({tuple(device["capability"]) for device in devices}) > 1:
        detail = "the GPUs differ; ranks on different ones choose different attention kernels"
        fix = "name the kernel by --attention-kernel, or use GPUs of one kind"
        findings.append(Finding(DEVICE, "GPUs", Status.WARNING, detail, fix))
    findings.append(
        Finding(
            DEVICE,
            "libraries",
            Status.OK if torch["cudnn"] else Status.WARNING,
            f"CUDA {torch['cuda']}, cuDNN {torch['cudnn'] or 'absent'}, NCCL {torch['nccl']}",
            None if torch["cudnn"] else "install a build of torch with cuDNN",
        )
    )
    findings.append(_max_connections(devices, variables))
    return findings


def _max_connections(devices: list[dict[str, Any]], variables: Mapping[str, str]) -> Finding:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = variables.get(name)
    if all(tuple(device["capability"]) >= (10, 0) for device in devices):
        return Finding(DEVICE, name, Status.OK, f"{value or 'unset'}; free on this GPU")
    if value in (None, "1"):
        detail = "1" if value else "unset; our entry points set it to 1"
        return Finding(DEVICE, name, Status.OK, detail)
    return Finding(
        DEVICE,
        name,
        Status.PROBLEM,
        f"{value}; Megatron refuses context parallelism unless it is 1 on this GPU",
        f"export {name}=1 (docs/multi-node.md says why)",
    )


def kernel_findings(answer: Answer) -> list[Finding]:
    """Which kernel ``auto`` takes, and why not the others.

    Args:
        answer: of `inspections.kernels`.
    """
    if answer.failure:
        fix = "report it with this line; until then name a kernel by --attention-kernel"
        return [Finding(KERNELS, "auto", Status.PROBLEM, answer.failure, fix)]
    facts = answer.facts
    chosen, tested = facts["chosen"], facts["self_test"]
    findings = []
    for name, refusal in facts["refusals"].items():
        reason = refusal or tested.get(name)
        if name == chosen:
            detail = "chosen by auto" + (", its self-test passes" if name in tested else "")
            findings.append(Finding(KERNELS, name, Status.OK, detail))
        elif tested.get(name):
            fix = "update cuDNN, or leave it to auto, which does not take this kernel"
            detail = f"it fails its self-test: {tested[name]}"
            findings.append(Finding(KERNELS, name, Status.WARNING, detail, fix))
        elif reason:
            findings.append(Finding(KERNELS, name, Status.NOTE, f"cannot be used: {reason}"))
        else:
            findings.append(Finding(KERNELS, name, Status.NOTE, "can be used, not chosen by auto"))
    if chosen == "naive":
        reasons = "; ".join(
            f"{name}: {facts['refusals'][name] or tested.get(name)}" for name in ("te", "flash")
        )
        findings.append(
            Finding(
                KERNELS,
                "auto",
                Status.PROBLEM,
                "only naive is left, whose memory grows with queries times keys",
                f"remove one reason: {reasons}",
            )
        )
    return findings


def loopback_finding(backend: str, answer: Answer) -> Finding:
    """Two processes of this machine reach each other.

    Args:
        backend: ``gloo`` or ``nccl``.
        answer: of `inspections.loopback`.
    """
    if not answer.failure:
        facts = answer.facts
        detail = f"{facts['ranks']} rank(s) exchanged tensors in {facts['seconds']:.2f} s"
        return Finding(NETWORK, backend, Status.OK, detail)
    fix = {
        "gloo": "let this host's name resolve to one of its addresses (/etc/hosts), or export "
        "GLOO_SOCKET_IFNAME=lo for one machine, its network interface for several",
        "nccl": "run again with NCCL_DEBUG=INFO; on one machine try NCCL_SOCKET_IFNAME=lo, "
        "NCCL_P2P_DISABLE=1 or a larger /dev/shm",
    }[backend]
    return Finding(NETWORK, backend, Status.PROBLEM, f"it failed: {answer.failure}", fix)


def _dotted(version: list[int]) -> str:
    return ".".join(map(str, version))
