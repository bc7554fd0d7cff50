"""Devices, kernels and loopback: what is said of machines that are not here, and of this one."""

from typing import Any

import pytest
import torch

from megatron_splitkv.attention.kernels.rules import Machine, Request, kernel_report
from megatron_splitkv.doctor import Finding, Status, machine
from megatron_splitkv.doctor.probe import Answer, run_inspection

REQUEST = Request(torch.bfloat16, 32, 8, 128)


def environment(*capabilities: tuple[int, int], cuda: str | None = "13.0") -> dict[str, Any]:
    return {
        "torch": {"version": "2.13.0", "cuda": cuda, "cudnn": "9.20.0", "nccl": "2.29.7"},
        "devices": [
            {"name": "GPU", "capability": list(capability), "gigabytes": 80.0}
            for capability in capabilities
        ],
    }


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_no_gpu_is_no_fault() -> None:
    (finding,) = machine.device_findings(environment(), has_driver=False)
    assert finding.status is Status.NOTE


@pytest.mark.parametrize(("cuda", "said"), [(None, "without CUDA"), ("13.0", "finds no GPU")])
def test_a_driver_without_a_device_is_one(cuda: str | None, said: str) -> None:
    (finding,) = machine.device_findings(environment(cuda=cuda), has_driver=True)
    assert finding.status is Status.PROBLEM
    assert said in finding.detail


@pytest.mark.parametrize(
    ("capability", "value", "status"),
    [
        ((9, 0), None, Status.OK),
        ((9, 0), "1", Status.OK),
        ((9, 0), "8", Status.PROBLEM),
        ((10, 0), "8", Status.OK),
    ],
)
def test_max_connections_as_megatron_demands_it(
    capability: tuple[int, int], value: str | None, status: Status
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    variables = {} if value is None else {name: value}
    found = machine.device_findings(environment(capability), has_driver=True, variables=variables)
    assert by_subject(found)[name].status is status


def test_gpus_of_two_kinds_are_pointed_out() -> None:
    found = machine.device_findings(environment((9, 0), (8, 0)), has_driver=True, variables={})
    assert by_subject(found)["GPUs"].status is Status.WARNING


HOPPER = Machine("cuda", (9, 0), (9, 20, 0), has_transformer_engine=True, has_flash=True)


def kernels(device: Machine, chosen: str, **self_test: str | None) -> dict[str, Finding]:
    facts = {
        "device": "cuda:0",
        "chosen": chosen,
        "refusals": kernel_report(device, REQUEST),
        "self_test": self_test,
    }
    return by_subject(machine.kernel_findings(Answer(facts)))


def test_every_kernel_has_its_line() -> None:
    found = kernels(HOPPER, "te", te=None, flash=None)
    assert list(found) == ["naive", "cpu", "te", "flash", "flex"]
    assert found["te"].status is Status.OK
    assert found["te"].detail == "chosen by auto, its self-test passes"
    assert found["flash"].detail == "can be used, not chosen by auto"
    assert found["cpu"].detail.startswith("cannot be used: it computes on the CPU")


def test_a_failed_self_test_is_no_refusal_of_the_rules() -> None:
    found = kernels(HOPPER, "flash", te="its dq is off by 2e-1", flash=None)
    assert found["te"].status is Status.WARNING
    assert found["te"].detail == "it fails its self-test: its dq is off by 2e-1"
    assert found["flash"].status is Status.OK


def test_only_naive_on_a_gpu_is_a_problem() -> None:
    found = kernels(Machine("cuda", (7, 5), (9, 20, 0)), "naive")
    assert found["auto"].status is Status.PROBLEM
    assert "compute capability >= 9.0, this is 7.5" in str(found["auto"].fix)
    assert "auto" not in kernels(HOPPER, "te", te=None)


def test_kernels_of_this_machine() -> None:
    answer = run_inspection("kernels", "32", "8", "128", timeout=300.0)
    found = by_subject(machine.kernel_findings(answer))
    has_gpu = torch.cuda.is_available()
    chosen = [name for name, f in found.items() if f.detail.startswith("chosen by auto")]
    assert chosen == ["cpu"] or (has_gpu and chosen in (["te"], ["flash"]))
    assert has_gpu or answer.facts["self_test"] == {}


def test_two_processes_reach_each_other() -> None:
    answer = run_inspection("loopback", "gloo", "2", timeout=300.0)
    finding = machine.loopback_finding("gloo", answer)
    assert finding.status is Status.OK, finding
    assert answer.facts["ranks"] == 2


def test_processes_that_do_not_are_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    answer = run_inspection("loopback", "gloo", "2", timeout=300.0)
    finding = machine.loopback_finding("gloo", answer)
    assert finding.status is Status.PROBLEM
    assert "no-such-interface" in finding.detail
    assert "GLOO_SOCKET_IFNAME" in str(finding.fix)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_reaches_what_there_is() -> None:
    ranks = min(2, torch.cuda.device_count())
    answer = run_inspection("loopback", "nccl", str(ranks), timeout=300.0)
    assert machine.loopback_finding("nccl", answer).status is Status.OK, answer
