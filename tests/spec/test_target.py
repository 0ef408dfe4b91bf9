"""Machines, and the versions that were tried there."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_compiler.lowerings.shared.limits import triton_releases
from attn_compiler.spec import dtypes
from attn_compiler.spec.dtypes import ALL
from attn_compiler.spec.numerics import FLOOR_ULPS, difference, exact_dtype, largest
from attn_compiler.spec.target import Target, cudnn_words
from attn_compiler.spec.tried import NEWEST, not_tried, notices
from tests import fresh, imports


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
    assert Target.current("cuda:0") == dataclasses.replace(Target.current("cpu"), device="cuda", avx512=False)


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


@pytest.mark.parametrize("capability", ["avx512", "avx2"])
def test_avx512_is_what_kernels_use(capability: str) -> None:
    code = (
        "import torch; from attn_compiler.spec.target import Target;"
        "print(Target.current('cpu').avx512, torch.backends.cpu.get_cpu_capability())"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    avx512, found = run.stdout.split()
    assert avx512 == str(found == "AVX512")
    assert capability == "avx512" or avx512 == "False"


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
        "mixed_gpus": True,
        "processors": 114,
        "ptxas": "12.8",
        "without_wgmma": True,
        "packaged": True,
        "avx512": True,
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
    assert Target.fake(device="cpu", avx512=True).words == "cpu, torch 2.13.0, triton 3.7.0; AVX-512"
    assert Target.fake(triton_interpreted=True).words.endswith("triton 3.7.0; triton interpreted")
    mixed = Target.fake(flash_attn_4="4.0.0b36", mixed_gpus=True)
    assert mixed.words.endswith("triton 3.7.0, flash-attn-4 4.0.0b36; GPUs of several architectures")


@pytest.mark.parametrize(("version", "words"), [(91900, "9.19.0"), (92601, "9.26.1"), (8902, "8.9.2")])
def test_cudnn_words(version: int, words: str) -> None:
    assert cudnn_words(version) == words


def test_what_is_newer_is_said() -> None:
    said = not_tried("torch", "2.16.0+cu132")
    assert said == "torch 2.16 was not tried with this version of attn_compiler; 2.15 is the newest that was"
    assert not_tried("triton", "4.0.0") is not None


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.15.3"), ("torch", "2.11.0+cpu"), ("triton", "3.9.1"), ("triton", "")]
)
def test_of_what_was_tried_or_is_absent_nothing_is_said(name: str, version: str) -> None:
    assert not_tried(name, version) is None


def test_the_newest_triton_that_was_tried_is_the_newest_that_kernels_were_compiled_with() -> None:
    assert NEWEST["triton"] == max(release for releases in triton_releases.COMPILED.values() for release in releases)


def test_of_a_machine_both_are_said() -> None:
    target = Target.fake(torch="2.16.0", triton="3.10.0")
    assert [said.split(" was")[0] for said in notices(target)] == ["torch 2.16", "triton 3.10"]
    assert len(notices(Target.fake(device="cpu", torch="2.16.0", triton="3.10.0"))) == 1
    assert notices(Target.fake()) == ()


# The numeric rule.
INF, NAN = math.inf, math.nan


def test_every_dtype_of_attention_has_a_rounding_and_a_wider_dtype() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in FLOOR_ULPS} == set(ALL)
    for dtype in FLOOR_ULPS:
        wider = exact_dtype(dtype)
        assert torch.finfo(wider).eps < torch.finfo(dtype).eps or wider is dtype is torch.float64


@pytest.mark.parametrize(
    ("x", "exact", "apart"),
    [
        (1.0, 3.5, 2.5),
        (-2.0, -2.0, 0.0),
        (INF, INF, 0.0),
        (NAN, NAN, 0.0),
        (INF, -INF, INF),
        (NAN, 0.0, INF),
        (1.0, NAN, INF),
    ],
)
def test_differences_of_what_is_not_finite(x: float, exact: float, apart: float) -> None:
    found = difference(torch.tensor([x], dtype=torch.float16), torch.tensor([exact], dtype=torch.float32))
    assert (found.item(), found.dtype) == (apart, torch.float32)


def test_the_largest_of_what_counts() -> None:
    x = torch.tensor([1.0, -7.0, 9.0, NAN])
    assert largest(x, torch.tensor([True, True, False, True])) == 7.0
    assert largest(x, torch.zeros(4).bool()) == 0.0
    assert largest(torch.empty(0, 3), torch.empty(0, 3).bool()) == 0.0


#: who may name dtypes in half precision one by one: what a family takes, a library's names
NAMED = {"dtypes.py", "takes.py", "graphs.py", "fp8_launch.py"}


def test_half_precision_is_two_bytes_and_the_rest_is_wider() -> None:
    assert {dtypes.BYTES[name] for name in dtypes.HALF} == {2}
    assert [dtypes.BYTES[name] for name in dtypes.ALL] == [2, 2, 4, 8]
    assert (torch.bfloat16, torch.float16) == dtypes.HALVES


def test_half_precision_alone_is_computed_in_another_dtype() -> None:
    assert {dtype: dtypes.computed_in(dtype) for dtype in dtypes.EVERY} == {
        **dict.fromkeys(dtypes.HALVES, torch.float32),
        **{dtype: dtype for dtype in map(torch.__dict__.__getitem__, dtypes.FULL)},
    }


def test_no_other_list_of_half_precision_is_kept() -> None:
    both = re.compile(
        r"\b(torch\.|\")float16\b.*\b(torch\.|\")bfloat16\b|\b(torch\.|\")bfloat16\b.*\b(torch\.|\")float16\b"
    )
    files = (imports.ROOT / imports.PACKAGE).rglob("*.py")
    listed = [path for path in files if path.name not in NAMED and any(map(both.search, path.read_text().splitlines()))]
    assert listed == []
