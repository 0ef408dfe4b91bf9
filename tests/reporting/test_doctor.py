from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attn_compiler import __main__ as command_line, lowerings
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting import doctor
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor
from tests import fresh

NEEDS_GPU = Reason(code=Code.DEVICE, rule="needs a CUDA device", observed="cpu", remedy="run on a GPU")
NEEDS_SM90 = Reason(code=Code.ARCHITECTURE, rule="needs sm90", observed="sm80")
INSTALL = Reason(
    code=Code.LIBRARY_MISSING, rule="package fa4 is installed", observed="it is not", remedy="pip install fa4"
)


@dataclass
class _Lowering:
    name: str
    on_cpu: tuple[Reason, ...] = ()
    on_cuda: tuple[Reason, ...] = ()

    def unavailable(self, target: Target) -> list[Reason]:
        return list(self.on_cuda if target.device == "cuda" else self.on_cpu)


KNOWN = (
    _Lowering("sdpa"),
    _Lowering("cudnn", on_cpu=(NEEDS_GPU,)),
    _Lowering("fa4", on_cpu=(NEEDS_GPU, INSTALL), on_cuda=(NEEDS_SM90, INSTALL)),
)
CPU, GPU = Target.fake(device="cpu"), Target.fake()


def _rendered(checkup: doctor.Checkup) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(*doctor.to_tables(checkup))
    return capture.get()


def test_every_lowering_is_asked_about_every_target() -> None:
    rows = doctor.availabilities(KNOWN, [GPU, CPU])
    assert [(row.lowering, row.device, row.available) for row in rows] == [
        ("sdpa", "cuda", True),
        ("sdpa", "cpu", True),
        ("cudnn", "cuda", True),
        ("cudnn", "cpu", False),
        ("fa4", "cuda", False),
        ("fa4", "cpu", False),
    ]


def test_table_says_where_or_why_not_and_what_to_do() -> None:
    checkup = doctor.Checkup(facts=(), lowerings=doctor.availabilities(KNOWN, [GPU, CPU]))
    lines = _rendered(checkup).splitlines()
    assert any("sdpa" in line and "cuda, cpu" in line for line in lines)
    cudnn = next(line for line in lines if "cudnn" in line)
    assert "needs a CUDA device" not in cudnn  # it runs on the GPU that is here
    assert any("fa4" in line and "nothing here" in line and "needs sm90; observed sm80" in line for line in lines)
    assert any("pip install fa4" in line for line in lines)
    assert sum("needs a CUDA device" in line for line in lines) == 0


def test_table_on_a_machine_without_gpu() -> None:
    lines = _rendered(doctor.Checkup(facts=(), lowerings=doctor.availabilities(KNOWN, [CPU]))).splitlines()
    assert any("cudnn" in line and "nothing here" in line and "run on a GPU" in line for line in lines)


def test_lowerings_of_which_the_same_is_said_share_a_row() -> None:
    known = (*KNOWN, *(dataclasses.replace(KNOWN[1], name=name) for name in ("decode", "hopper")))
    lines = _rendered(doctor.Checkup(facts=(), lowerings=doctor.availabilities(known, [CPU]))).splitlines()
    assert sum("needs a CUDA device; observed cpu" in line for line in lines) == 2
    assert any("cudnn, decode, hopper" in line and "nothing here" in line for line in lines)
    assert any("fa4" in line and "decode" not in line for line in lines)


def test_the_compiler_is_found_and_run() -> None:
    found = doctor.compiler(torch_inductor.cpp_compiler())
    assert found.advice is None
    assert any(character.isdigit() for character in found.value)


def test_a_missing_compiler_comes_with_advice() -> None:
    found = doctor.compiler(None)
    assert found.value == "none that runs"
    assert found.advice is not None
    assert "CXX" in found.advice


def test_where_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    found = {fact.name: fact for fact in doctor.caches(torch_inductor)}
    assert found["Inductor's cache"] == doctor.Fact(name="Inductor's cache", value=str(tmp_path / "inductor"))
    assert found["Triton's cache"].value == str(tmp_path / "triton")


def test_a_cache_that_can_not_be_made_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    (found,) = doctor.caches(torch_inductor)
    assert found.value.startswith("none: ")
    assert "TORCHINDUCTOR_CACHE_DIR" in str(found.advice)


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    query = [sys.executable, "-c", "print('580.95.05')"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.driver(query) == doctor.Fact(name="NVIDIA driver", value="580.95.05")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in str(doctor.driver(query).advice)


@pytest.mark.parametrize("query", [["no-such-command"], [sys.executable, "-c", "raise SystemExit(1)"]])
def test_a_machine_without_a_driver_has_none(query: list[str]) -> None:
    assert doctor.driver(query) == doctor.Fact(name="NVIDIA driver", value="none that nvidia-smi finds")


@pytest.mark.parametrize(("version", "advised"), [("3.7.1", False), ("9.0.0", True)])
def test_a_newer_triton_than_was_tried_is_said(version: str, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda distribution: version)
    advice = {fact.name: fact.advice for fact in doctor.machine_facts()}["triton"]
    assert (advice is not None and advice.startswith("triton 9.0 was not tried")) is advised


def test_the_checkup_has_all_of_this_machine() -> None:
    names = {fact.name for fact in doctor.examine().facts}
    assert {"torch", "NVIDIA driver", "C++ compiler", "Inductor's cache", "Triton's cache"} <= names


def test_the_extras_of_an_advice_are_no_markup() -> None:
    against = Reason(
        code=Code.LIBRARY_MISSING,
        rule="flash-attn-4 is installed",
        observed="none",
        remedy="pip install 'attn_compiler[fa4]'",
    )
    fact = doctor.Fact(name="flash-attn-4", value="not installed", advice="pip install 'attn_compiler[fa4]'")
    row = doctor.Availability(lowering="fa4", device="cuda", reasons=(against,))
    assert _rendered(doctor.Checkup(facts=(fact,), lowerings=(row,))).count("'attn_compiler[fa4]'") == 2


def test_facts_of_this_machine() -> None:
    facts = {fact.name: fact for fact in doctor.machine_facts()}
    assert facts["torch"].value == str(torch.__version__)
    assert facts["Python"].value == ".".join(map(str, sys.version_info[:3]))
    assert {"triton", "cuDNN", "transformers", "attn_compiler"} <= set(facts)
    assert any(name.startswith("GPU") for name in facts)


@pytest.mark.gpu
def test_gpu_is_named() -> None:
    facts = {fact.name: fact for fact in doctor.machine_facts()}
    assert torch.cuda.get_device_name(0) in facts["GPU 0"].value


def test_missing_package_comes_with_advice() -> None:
    fact = doctor._package("surely-not-installed", "pip install it")
    assert (fact.value, fact.advice) == ("not installed", "pip install it")
    assert doctor._package("torch", "pip install it").advice is None


def test_unsupported_torch_is_told_and_nothing_else_is_tried() -> None:
    code = """
import sys, torch
torch.__version__ = "2.10.0"
from attn_compiler.reporting.doctor import examine
checkup = examine()
assert not checkup.lowerings
assert "not supported" in next(fact.advice for fact in checkup.facts if fact.name == "torch")
"""
    fresh.run(code)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lowerings, "LOWERINGS", KNOWN)
    assert command_line.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {fact["name"] for fact in printed["facts"]} >= {"torch", "Python", "cuDNN"}
    cudnn = next(row for row in printed["lowerings"] if row["lowering"] == "cudnn" and row["device"] == "cpu")
    assert cudnn["available"] is False
    assert cudnn["reasons"] == [{"code": "AC102", "rule": NEEDS_GPU.rule, "observed": "cpu", "remedy": "run on a GPU"}]


def test_tables_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lowerings, "LOWERINGS", KNOWN)
    assert command_line.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(lowering.name in printed for lowering in KNOWN)


def test_packages_say_what_they_gain_on_a_machine_that_was_measured() -> None:
    on_hopper = doctor.gains(GPU)
    assert set(on_hopper) == {"flash-attn-4", "nvidia-cudnn-frontend"}
    assert "measured sorts of attention" in on_hopper["flash-attn-4"]
    assert doctor.gains(CPU) == doctor.gains(Target.fake(sm=80)) == {}
    advice = {fact.name: fact.advice for fact in doctor.machine_facts(gains={"flash-attn-4": ". Gains much"})}
    if advice["flash-attn-4"] is not None:
        assert advice["flash-attn-4"].endswith(". Gains much")
