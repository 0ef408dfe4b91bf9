from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.limits import known_bad
from attn_compiler.lowerings.shared.limits.known_bad import CUDNN, FLASH_ATTN_4, refusal
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec, SlidingWindow
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.test_lowering import laid
from tests.lowerings.specs import CAUSAL, bias, make_spec, words

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
