"""Discards are of known kinds."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import discards, environment


def test_an_error_of_eager_is_told_without_its_numbers() -> None:
    left = discards.of_eager(IndexError("Dimension out of range (expected to be in range of [-3, 2], but got 4)\nmore"))
    assert str(left) == "eager raises IndexError: Dimension out of range (expected to be in range of , but got )"


@pytest.mark.parametrize(
    "text",
    [
        "a variable was modified by an inplace operation: [CUDABFloat16Type [2, 16, 7]], which is",
        "a variable was modified by an inplace operation: [torch.cuda.HalfTensor [2, 32, 16]] is at version 1",
        "modified by an inplace operation: [X [2]], which is output 0 of ScaledDotProductCudnnAttentionBackward0, is at",
        "cannot reshape tensor\nException raised from infer_size_impl (most recent call first):\nframe #0: std::allocator<char>",
    ],
)
def test_names_of_types_are_no_errors_of_the_machine(text: str) -> None:
    assert discards.of_eager(RuntimeError(text)) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
        AssertionError("x"),
    ],
)
def test_an_error_of_the_machine_is_no_discard(error: Exception) -> None:
    assert discards.of_eager(error) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError("cuDNN Frontend error: The stride for the last dimension corresponding to the embedding size per "
                      "head should be 1 for output_names::O"), "strides"),
        (AttributeError("'NoneType' object has no attribute 'stride'"), "empty batch"),
    ],
)  # fmt: skip
def test_what_cudnn_can_not_do_in_eager_either(error: Exception, what: str) -> None:
    assert what in str(discards.of_eager(error))


def test_after_an_error_of_a_kernel_comes_nothing_more() -> None:
    left = discards.of_eager(RuntimeError("CUDA error: device-side assert triggered\nmore"))
    assert left is not None
    assert left.is_last
    other = discards.of_eager(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert other is not None
    assert not other.is_last


def test_of_torch_only_what_is_listed() -> None:
    assert discards.of_torch("InternalError: something new") is None
    assert discards.of_torch("Unsupported: argument 'is_causal' must be bool, not SymBool") is not None


def test_processes_on_the_cpu_see_no_gpu() -> None:
    before = dict(os.environ)
    with environment.prepared("cpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["TRITON_INTERPRET"] == "1"
    assert dict(os.environ) == before
    assert "CUDA_VISIBLE_DEVICES" not in environment.variables("cuda")


def test_a_reshape_of_a_roll_is_no_fault_of_ours() -> None:
    text = "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension ...)"
    assert discards.of_roll(text, source="k = k.roll(1, 2)", inner="aot_eager") is not None
    assert discards.of_roll(text, source="k = k.roll(1, 2)", inner="inductor") is None
    assert discards.of_roll(text, source="k = k.flip(2)", inner="aot_eager") is None
