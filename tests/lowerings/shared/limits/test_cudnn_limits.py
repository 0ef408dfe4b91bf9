from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.limits import known_bad
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.target import Target
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, dense, make_spec, words

OLD, NEW = "2.11.0", "2.15.0"


def why_not(target: Target, **changes: Any) -> str:
    return words(by_name("sdpa_cudnn").why_not(make_spec(**changes), target))


def takes(target: Target, **changes: Any) -> bool:
    return why_not(target, **changes) == ""


def test_version() -> None:
    unavailable = by_name("sdpa_cudnn").unavailable
    assert "cuDNN 9.0.0 or newer; observed none; install a CUDA build of torch" in words(
        unavailable(Target.fake(cudnn=0))
    )
    assert "observed 8.9.7" in words(unavailable(Target.fake(cudnn=8907)))
    assert unavailable(Target.fake(cudnn=90100)) == []


def test_deterministic_mode_is_refused() -> None:
    assert "observed they are; torch.use_deterministic_algorithms(False)" in why_not(Target.fake(deterministic=True))


@pytest.mark.parametrize(
    ("sm", "cudnn", "torch", "head_dims", "taken"),
    [
        (90, 91900, OLD, (256, 256), True),
        (90, 90900, OLD, (256, 256), False),
        (90, 91900, OLD, (192, 192), True),
        (80, 91900, OLD, (136, 136), False),
        (100, 91900, OLD, (256, 256), False),
        (100, 91900, OLD, (192, 128), True),
        (100, 91002, OLD, (192, 128), False),
        (103, 91900, OLD, (192, 128), True),
        (90, 92000, "2.13.0", (256, 256), False),
        (90, 92000, "2.13.0", (192, 128), True),
        (90, 92600, NEW, (256, 256), True),
        (90, 92600, NEW, (192, 192), True),
        (100, 92600, NEW, (256, 256), True),
        (107, 92500, NEW, (256, 256), False),
        (107, 92600, NEW, (256, 256), True),
        (120, 92600, NEW, (256, 256), False),
        (120, 92600, NEW, (128, 128), True),
    ],
)
def test_head_dims_of_the_forward(sm: int, cudnn: int, torch: str, head_dims: tuple[int, int], taken: bool) -> None:
    target = Target.fake(sm=sm, cudnn=cudnn, torch=torch)
    assert takes(target, head_dim=head_dims[0], head_dim_v=head_dims[1], needs_grad=False) == taken
    if not taken:
        assert "is at most" in why_not(target, head_dim=head_dims[0], head_dim_v=head_dims[1], needs_grad=False)


@pytest.mark.parametrize("torch", [OLD, NEW])
@pytest.mark.parametrize(
    ("head_dims", "taken"),
    [
        ((128, 128), True),
        ((128, 64), True),
        ((256, 256), True),
        ((192, 128), True),
        ((192, 192), False),
        ((160, 64), False),
    ],
)
def test_head_dims_of_the_backward(torch: str, head_dims: tuple[int, int], taken: bool) -> None:
    target = Target.fake(cudnn=92600, torch=torch)
    reasons = why_not(target, head_dim=head_dims[0], head_dim_v=head_dims[1])
    assert (reasons == "") == taken
    if not taken:
        assert "at most 128, or (192, 128), or (256, 256)" in reasons


@pytest.mark.parametrize(
    ("p", "cudnn", "seqlen_q", "expected"),
    [
        (0.125, 91900, 128, ""),
        (0.1, 91900, 128, "dropout is a multiple of 1/16; observed 0.1"),
        (0.125, 91101, 128, "for dropout, a cuDNN outside of 9.11 to 9.13"),
        (0.125, 91300, 128, "a cuDNN outside of 9.11 to 9.13"),
        (0.125, 91400, 128, ""),
        (0.125, 91900, 1, "with dropout, more than one query; observed seqlen_q 1"),
    ],
)
def test_dropout(p: float, cudnn: int, seqlen_q: int, expected: str) -> None:
    reasons = why_not(Target.fake(cudnn=cudnn), dropout_p=p, seqlen_q=seqlen_q)
    assert expected in reasons
    assert expected or not reasons


def test_more_than_one_key() -> None:
    assert "more than one key; observed seqlen_kv 1" in why_not(Target.fake(), seqlen_kv=1)
    assert "more than one key; observed seqlen_kv s0 - 1" in why_not(
        Target.fake(), seqlen_kv="s0 - 1", needs_grad=False
    )
    assert takes(Target.fake(), seqlen_kv="s0", seqlen_q="s0", needs_grad=False)


@pytest.mark.parametrize(
    ("sm", "cudnn", "broken"),
    [
        (100, 91900, True),
        (103, 92000, True),
        (110, 92500, True),
        (100, 92401, False),
        (100, 92501, False),
        (100, 91800, False),
        (90, 91900, False),
        (120, 92000, False),
    ],
)
def test_broken_decode(sm: int, cudnn: int, broken: bool) -> None:
    target = Target.fake(sm=sm, cudnn=cudnn)
    reasons = why_not(target, seqlen_q=1, seqlen_kv=512, needs_grad=False)
    assert ("decodes right on this GPU" in reasons) == broken
    assert (known_bad.CUDNN["decode"].link in reasons) == broken
    assert "decodes right" not in why_not(target, seqlen_q="s0", seqlen_kv=512, needs_grad=False)


def test_one_query_has_no_gradient() -> None:
    for cudnn in (91900, 92600):
        reasons = why_not(Target.fake(cudnn=cudnn), seqlen_q=1, seqlen_kv=512)
        assert "its dK and dV can be NaN" in reasons
        assert takes(Target.fake(cudnn=cudnn), seqlen_q=1, seqlen_kv=512, needs_grad=False)


# ---- NaN in dQ: https://github.com/pytorch/pytorch/issues/196678 ------------------------------------------------------


@pytest.mark.parametrize("length", [64, 192, 704, 2112, "s0"])
def test_nan_backward_is_refused_by_name(length: Dim) -> None:
    for changes in ({}, {"mask": dense(1, 1, length, length)}, {"mask": dense(2, 1, 1, length, dtype="bfloat16")}):
        reasons = why_not(Target.fake(), seqlen_q=length, seqlen_kv=length, **changes)
        assert "dQ can be NaN (https://github.com/pytorch/pytorch/issues/196678)" in reasons
        assert "update cuDNN, or pad the keys to a multiple of 128" in reasons


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (Target.fake(), {"needs_grad": False}),
        (Target.fake(), {"mask": CAUSAL}),
        (Target.fake(), {"mask": BOTTOM_RIGHT}),
        (Target.fake(cudnn=92600), {}),
        (Target.fake(sm=100, cudnn=91800), {}),
        (Target.fake(), {"seqlen_q": 640, "seqlen_kv": 768}),
        (Target.fake(), {"seqlen_q": 423, "seqlen_kv": 423}),
        (Target.fake(), {"seqlen_q": 704, "seqlen_kv": 768}),
    ],
)
def test_nan_backward_is_not_feared_elsewhere(target: Target, changes: dict[str, Any]) -> None:
    assert takes(target, **{"seqlen_q": 704, "seqlen_kv": 704, **changes})


def test_nan_backward_with_a_mask_watches_the_queries_too() -> None:
    assert "issues/196678" in why_not(Target.fake(), seqlen_q=704, seqlen_kv=768, mask=dense(1, 1, 704, 768))


# ---- mask dtypes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("torch", "taken"), [(OLD, False), ("2.14.0", False), (NEW, True)])
def test_a_float32_mask_was_once_read_as_bfloat16(torch: str, taken: bool) -> None:
    assert takes(Target.fake(torch=torch), mask=dense(1, 1, 128, 128, dtype="float32")) == taken
