from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler.spec.target import Target, cudnn_words
from tests import fresh


def test_cpu_has_no_gpu_facts() -> None:
    target = Target.current("cpu")
    assert (target.device, target.sm, target.cudnn) == ("cpu", 0, 0)
    assert target.torch == str(torch.__version__)
    assert target.disabled == frozenset()


def test_asking_about_the_cpu_does_not_initialise_cuda() -> None:
    code = "import torch; from attn_compiler.spec.target import Target; Target.current('cpu'); print(torch.cuda.is_initialized())"
    run = fresh.run(code)
    assert run.stdout.strip() == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_cuda_without_a_gpu_is_known_to_have_none() -> None:
    assert Target.current("cuda:0") == dataclasses.replace(Target.current("cpu"), device="cuda")


@pytest.mark.gpu
def test_cuda_facts_are_those_of_the_device() -> None:
    target = Target.current("cuda:0")
    major, minor = torch.cuda.get_device_capability(0)
    assert (target.device, target.sm, target.cudnn) == ("cuda", 10 * major + minor, torch.backends.cudnn.version())
    assert target.processors == torch.cuda.get_device_properties(0).multi_processor_count


def test_kernels_that_the_user_switched_off_are_seen() -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert Target.current("cpu").disabled == {"efficient", "cudnn", "math"}
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert Target.current("cpu").disabled == {"cudnn"}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_deterministic_mode_is_seen() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert Target.current("cpu").deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", ["1", "0"])
def test_whether_triton_is_interpreted_is_known_from_the_start(value: str) -> None:
    code = "from attn_compiler.spec.target import Target; print(Target.current('cpu').triton_interpreted)"
    environment = {**os.environ, "TRITON_INTERPRET": value}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == str(value == "1")


def test_fake_is_an_h200_or_a_cpu() -> None:
    assert (Target.fake().sm, Target.fake().cudnn) == (90, 91900)
    assert (Target.fake(device="cpu").sm, Target.fake(device="cpu").cudnn) == (0, 0)
    assert (Target.fake().processors, Target.fake(device="cpu").processors) == (132, 0)
    assert Target.fake(sm=100, cudnn=0) == dataclasses.replace(Target.fake(), sm=100, cudnn=0, ptxas="")
    assert (Target.fake(sm=90).ptxas, Target.fake(sm=80).ptxas, Target.fake(device="cpu").ptxas) == ("13.1", "", "")


def test_digest_differs_with_every_field() -> None:
    changed: dict[str, Any] = {
        "device": "cpu",
        "sm": 80,
        "cudnn": 91500,
        "torch": "2.14.0",
        "triton": "",
        "cudnn_frontend": "1.22.1",
        "disabled": frozenset({"flash", "math"}),
        "deterministic": True,
        "triton_interpreted": True,
        "flash_attn_4": "4.0.0b36",
        "fla": "0.6.0",
        "mixed_gpus": True,
        "processors": 114,
        "ptxas": "12.8",
        "without_wgmma": True,
        "packaged": True,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(Target)}
    base = Target.fake()
    digests = {base.digest(), *(dataclasses.replace(base, **{name: value}).digest() for name, value in changed.items())}
    assert len(digests) == len(changed) + 1


def test_words() -> None:
    assert Target.fake(torch="2.13.0", triton="3.7.0").words == "cuda sm90, cuDNN 9.19.0, torch 2.13.0, triton 3.7.0"
    cpu = Target.fake(device="cpu", triton="", disabled=frozenset({"math", "flash"}), deterministic=True)
    assert cpu.words == "cpu, torch 2.13.0; flash off; math off; deterministic"
    assert Target.fake(packaged=True).words.endswith("triton 3.7.0; for an exported program")
    assert Target.fake(triton_interpreted=True).words.endswith("triton 3.7.0; triton interpreted")
    mixed = Target.fake(flash_attn_4="4.0.0b36", mixed_gpus=True)
    assert mixed.words.endswith("triton 3.7.0, flash-attn-4 4.0.0b36; GPUs of several architectures")


@pytest.mark.parametrize(("version", "words"), [(91900, "9.19.0"), (92601, "9.26.1"), (8902, "8.9.2")])
def test_cudnn_words(version: int, words: str) -> None:
    assert cudnn_words(version) == words
