"""What cuDNN's graphs and kernels that are known to be bad can't do."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.limits import known_bad
from attn_compiler.lowerings.shared.limits.known_bad import CUDNN, FLASH_ATTN_4, refusal
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec, SlidingWindow
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.test_lowering import laid
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec, words

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
    assert "observed they are; call torch.use_deterministic" in why_not(Target.fake(deterministic=True))


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


WINDOW = MaskSpec(kinds=(SlidingWindow(left=9, right=9),), dense=Dense(shape=(1, 1, 2048, 2048), dtype="bool"))


def machine(name: str, version: int, **changes: Any) -> Target:
    sm = max(CUDNN[name].sms[0], 90)
    return Target.fake(cudnn=version, **{"sm": sm, "cudnn_frontend": "1.22.1", **changes})


@pytest.mark.parametrize("name", CUDNN)
def test_an_entry_says_what_where_and_until_when(name: str) -> None:
    bug = CUDNN[name]
    assert bug.what
    assert bug.rule
    assert bug.link.startswith("https://github.com/")
    assert bug.cudnn is not None
    first, fixed = bug.cudnn
    assert fixed is None or first < fixed
    assert all(fixed is None or first < version < fixed for version in bug.good)


@pytest.mark.parametrize("name", CUDNN)
def test_an_entry_meets_its_versions_and_architectures_alone(name: str) -> None:
    bug = CUDNN[name]
    assert bug.cudnn is not None
    first, fixed = bug.cudnn
    inside = max(first, 90_000)
    assert bug.meets(machine(name, inside))
    assert first == 0 or not bug.meets(machine(name, first - 1))
    assert fixed is None or (bug.meets(machine(name, fixed - 1)) and not bug.meets(machine(name, fixed)))
    assert not any(bug.meets(machine(name, version)) for version in bug.good)
    assert bug.sms[0] == 0 or not bug.meets(machine(name, inside, sm=bug.sms[0] - 1))
    assert not bug.meets(machine(name, inside, sm=bug.sms[1] + 1))


@pytest.mark.parametrize("name", FLASH_ATTN_4)
def test_an_entry_of_another_library_meets_architectures_alone(name: str) -> None:
    bug = FLASH_ATTN_4[name]
    assert bug.link.startswith("https://github.com/")
    for cudnn in (0, 91_900, 99_999):
        assert bug.meets(Target.fake(sm=bug.sms[0], cudnn=cudnn))
        assert not bug.meets(Target.fake(sm=bug.sms[0] - 1, cudnn=cudnn))
        assert not bug.meets(Target.fake(sm=bug.sms[1] + 1, cudnn=cudnn))


def test_a_refusal_names_the_link_and_the_version() -> None:
    (reason,) = refusal("nan_dq", Target.fake(), "seqlen_kv 192")
    assert CUDNN["nan_dq"].link in reason.rule
    assert reason.observed == "cuDNN 9.19.0 on sm90, seqlen_kv 192"
    assert refusal("nan_dq", Target.fake(cudnn=92_600), "seqlen_kv 192") == []


REFUSED: tuple[tuple[str, str, int, AttentionSpec], ...] = (
    ("blacklisted", "cudnn", 91_000, laid(make_spec())),
    ("blacklisted", "sdpa_cudnn", 91_001, make_spec()),
    (
        "nan_dq",
        "cudnn",
        91_900,
        laid(make_spec(seqlen_q=192, seqlen_kv=192, mask=CAUSAL, changes=(bias(1, 8, 192, 192),))),
    ),
    ("nan_dq", "sdpa_cudnn", 91_900, make_spec(seqlen_q=192, seqlen_kv=192)),
    ("one_query_gradient", "cudnn", 91_900, laid(make_spec(seqlen_q=1))),
    ("one_query_gradient", "sdpa_cudnn", 91_900, make_spec(seqlen_q=1)),
    ("decode", "cudnn", 92_000, laid(make_spec(seqlen_q=1, needs_grad=False))),
    ("decode", "sdpa_cudnn", 92_000, make_spec(seqlen_q=1, needs_grad=False)),
    ("dropout", "sdpa_cudnn", 91_200, make_spec(dropout_p=0.125)),
    ("keys_off_128", "cudnn", 91_500, laid(make_spec(seqlen_kv=200))),
    ("window", "cudnn", 91_400, laid(make_spec(seqlen_q=2048, seqlen_kv=2048, mask=WINDOW))),
)


@pytest.mark.parametrize(
    ("name", "lowering", "version", "spec"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_lowering_refuses_it_by_name(name: str, lowering: str, version: int, spec: AttentionSpec) -> None:
    assert CUDNN[name].link in words(by_name(lowering).why_not(spec, machine(name, version)))


def test_nan_is_not_feared_with_a_plain_diagonal() -> None:
    spec = laid(make_spec(seqlen_q=192, seqlen_kv=192, mask=MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)))
    assert by_name("cudnn").why_not(spec, machine("nan_dq", 91_900)) == []


def test_every_entry_has_a_refusal_or_a_demand() -> None:
    """Those of strides and statistics are kept by what is asked of tensors, that of FP8 waits for a lowering of its own."""
    assert set(known_bad.CUDNN) - {name for name, *_ in REFUSED} == {"fp8_hang", "unaligned_strides", "stats_strides"}
    for lowering in ("cudnn", "sdpa_cudnn"):
        assert by_name(lowering).demand(make_spec()).alignment == 16
