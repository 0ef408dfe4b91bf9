"""What PyTorch's kernels take: of the one for CPUs PyTorch itself is asked, of the others their differences are held."""

from __future__ import annotations

import itertools

import pytest
import torch

from attn_compiler.lowerings.sdpa.takes import CPU_FLASH, EFFICIENT, EFFICIENT_BEFORE_SM80, FLASH
from attn_compiler.lowerings.shared.limits.takes import OWN, Takes, check_gpu, refused
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import dense, make_spec, words

cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ALL = [FLASH, EFFICIENT, EFFICIENT_BEFORE_SM80, CPU_FLASH]


def _qkv(dtype: str, head_dim: int, head_dim_v: int | None = None) -> list[torch.Tensor]:
    made = getattr(torch, dtype)
    return [torch.randn(1, 2, 5, dim).to(made) for dim in (head_dim, head_dim, head_dim_v or head_dim)]


@pytest.mark.parametrize("dtype", CPU_FLASH.dtypes)
def test_the_kernel_for_cpus_runs_what_it_is_said_to_take(dtype: str) -> None:
    assert CPU_FLASH.tensors is not None
    for head_dim, tensor in itertools.product((1, 7), CPU_FLASH.tensors):
        q, k, v = _qkv(dtype, head_dim)
        bias = torch.zeros(1, 1, 5, 5).to(q.dtype if tensor == OWN else getattr(torch, tensor))
        if bias.dtype != q.dtype and dtype == "float64":
            # PyTorch takes float32 beside half precision alone; float32 is float32's own.
            continue
        out, _ = cpu_flash(q, k, v, attn_mask=bias)
        assert out.shape == q.shape
        assert out.isfinite().all()


def test_the_kernel_for_cpus_takes_no_more() -> None:
    with pytest.raises(RuntimeError):
        cpu_flash(*_qkv("float32", 8, 16))
    with pytest.raises(RuntimeError):
        cpu_flash(*_qkv("float32", 8), dropout_p=0.5)
    with pytest.raises(RuntimeError):
        cpu_flash(*_qkv("int32", 8))


@pytest.mark.parametrize("takes", ALL)
def test_no_one_changes_scores(takes: Takes) -> None:
    dtype = "float16"
    assert refused(takes, make_spec(dtype=dtype)) == []
    assert "no softcap" in words(refused(takes, make_spec(dtype=dtype, changes=(Softcap(cap=30.0),))))
    assert "no attention sinks" in words(refused(takes, make_spec(dtype=dtype, changes=(Sinks(requires_grad=False),))))


@pytest.mark.parametrize(("takes", "is_taken"), [(FLASH, False), (EFFICIENT, True), (CPU_FLASH, True)])
def test_flash_reads_no_mask(takes: Takes, is_taken: bool) -> None:
    assert (refused(takes, make_spec(mask=dense(1, 1, 128, 128))) == []) is is_taken


@pytest.mark.parametrize(
    ("takes", "dtype", "head_dim", "head_dim_v", "rule"),
    [
        (FLASH, "bfloat16", 256, None, ""),
        (FLASH, "bfloat16", 264, None, "at most 256"),
        (FLASH, "bfloat16", 64, 32, "one head_dim"),
        (FLASH, "float32", 64, None, "observed float32"),
        (EFFICIENT, "bfloat16", 264, 32, ""),
        (EFFICIENT, "bfloat16", 68, None, "multiple of 8"),
        (EFFICIENT, "float32", 68, None, ""),
        (EFFICIENT, "float32", 66, None, "multiple of 4"),
        (EFFICIENT_BEFORE_SM80, "float32", 65, None, ""),
        (EFFICIENT_BEFORE_SM80, "bfloat16", 64, None, "observed bfloat16"),
    ],
)
def test_head_dims_and_dtypes(takes: Takes, dtype: str, head_dim: int, head_dim_v: int | None, rule: str) -> None:
    found = words(refused(takes, make_spec(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)))
    assert rule in found
    assert bool(rule) == bool(found)


@pytest.mark.parametrize(("takes", "sm"), [(FLASH, 80), (EFFICIENT, 50)])
def test_the_first_architecture(takes: Takes, sm: int) -> None:
    assert check_gpu(takes, Target.fake(sm=sm)) == []
    assert f"from sm{sm}" in words(check_gpu(takes, Target.fake(sm=sm - 1)))
