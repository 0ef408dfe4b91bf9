"""On a GPU, in fresh processes with empty caches: no kernel of ours is compiled by its first launch. Threads compile them before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import bench_first_step, harness
from benchmarks.first_step import Job
from tests import late_kernels

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
#: more than the one that other tests have: with one, nothing is compiled ahead
THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "8"}

MODELS = (("llama", "prefill_left"), ("llama", "train_right"), ("llama", "train_right_checkpoint"), ("t5", "train"))


@pytest.mark.parametrize(("model", "call"), MODELS, ids=lambda name: str(name))
def test_no_kernel_of_a_model_is_compiled_by_its_launch(
    model: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="this test compiles models of transformers: pip install -e '.[models]'")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "8")
    job = Job(model=model, call=call, length=1024, batch=2, size="small", device="cuda:0", side=harness.BACKEND)
    first = bench_first_step.fresh_process(job, tmp_path, seconds=300, threads=8)
    assert {"triton", "hopper"} & {site.split()[0] for site in first["sites"].split(", ")}
    assert first["kernels_late"] == 0
    assert first["kernels_ahead"] >= (3 if "train" in call else 1)

    again = bench_first_step.fresh_process(job, tmp_path, seconds=300, threads=8)
    assert (again["kernels_ahead"], again["kernels_late"]) == (0, 0), "they are on disk"


def attention(name: str, caches: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What tests.late_kernels prints. Triton's own cache is where Inductor puts it."""
    given = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
    given |= {"TORCHINDUCTOR_CACHE_DIR": str(caches), **THREADS, **environment}
    command = [sys.executable, "-m", "tests.late_kernels", name, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"log": done.stderr}


@pytest.mark.parametrize("name", late_kernels.CASES)
def test_no_kernel_of_an_attention_is_compiled_by_its_launch(name: str, tmp_path: Path) -> None:
    if name == "hopper_fp8" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    found = attention(name, tmp_path, TORCH_LOGS="attn_compiler")
    assert found["lowering"] == name.split()[0]
    (ahead, late), second = found["counts"]
    assert late == 0
    assert ahead > 0
    assert second == [ahead, late]
    assert found["kernels"]
    for kernel in found["kernels"]:
        assert f"compiled {kernel} in " in found["log"]

    (again, _) = attention(name, tmp_path)["counts"]
    assert again == [0, 0], "they are on disk"


@pytest.mark.parametrize("name", ["triton padded", "triton biased", "triton packed", "decode"])
def test_no_kernel_is_compiled_after_the_second_of_50_lengths(name: str, tmp_path: Path) -> None:
    found = attention(name, tmp_path, "50")
    assert found["lowering"] == name.split()[0]
    assert found["graphs"] == 2, "one of the first length, one of any"
    assert len(found["counts"]) == 50
    assert found["counts"][-1] == found["counts"][1]


def test_one_thread_compiles_kernels_before_the_first_call_too(tmp_path: Path) -> None:
    found = attention("triton padded", tmp_path, TORCHINDUCTOR_COMPILE_THREADS="1")
    (ahead, late), _ = found["counts"]
    assert (ahead > 0, late) == (True, 0)
