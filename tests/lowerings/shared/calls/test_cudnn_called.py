"""`sdpa_cudnn` and the backward for other forwards ask the same; what cuDNN refuses by version is in test_cudnn_limits.py."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.calls import cudnn_backward, cudnn_called
from attn_compiler.spec.masks import Causal, Dense, MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, make_spec, words

H200 = Target.fake()


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({}, H200),
        ({"mask": CAUSAL}, H200),
        ({"dtype": "float32"}, H200),
        ({"head_dim": 7}, H200),
        ({"dropout_p": 0.1}, H200),
        ({}, Target.fake(sm=75)),
        ({}, Target.fake(cudnn=0)),
        ({}, Target.fake(disabled=frozenset({"cudnn"}))),
        ({}, Target.fake(deterministic=True)),
        ({"device": "cpu"}, H200),
    ],
    ids=str,
)
def test_the_forward_and_the_backward_refuse_alike(given: dict[str, Any], target: Target) -> None:
    spec = make_spec(**given)
    found = cudnn_called.why_not(spec, target)
    assert by_name("sdpa_cudnn").why_not(spec, target) == found
    assert cudnn_backward.why_not(spec, target)[: len(found)] == found


def test_the_backward_refuses_what_its_forward_would_hand_over() -> None:
    spec = make_spec(changes=(bias(1, 8, 256, 256),), seqlen_q=256, seqlen_kv=256, dropout_p=0.125)
    more = cudnn_backward.why_not(spec, H200)[len(cudnn_called.why_not(spec, H200)) :]
    assert [reason.rule.partition(":")[0] for reason in more] == ["no tensor joins the scores", "no dropout"]


def test_a_machine_that_cannot_run_it_is_judged_alone() -> None:
    (reason,) = cudnn_called.why_not(make_spec(dtype="float32", dropout_p=0.3), Target.fake(sm=75))
    assert "sm75" in reason.observed


def test_a_diagonal_is_told_as_a_flag_where_the_flag_serves() -> None:
    tensor = Dense(shape=(2, 1, 256, 256), dtype="bool")
    spec = make_spec(mask=MaskSpec(kinds=(Causal(),), dense=tensor), seqlen_q=256, seqlen_kv=256)
    assert cudnn_called.as_told(spec, H200).mask.dense is None
    # With a flag it refuses a site with dropout as it does without, so the site is told as it is.
    refused = make_spec(mask=spec.mask, seqlen_q=256, seqlen_kv=256, dropout_p=0.1)
    assert cudnn_called.as_told(refused, H200) is refused


def test_unequal_head_dims_of_unknown_sizes_wait_for_torch_2_13() -> None:
    spec = make_spec(head_dim=128, head_dim_v=64, seqlen_q="s0", seqlen_kv="s1")
    assert "before torch 2.13" in words(cudnn_called.why_not(spec, Target.fake(torch="2.12.0")))
    assert "before torch 2.13" not in words(cudnn_called.why_not(spec, Target.fake(torch="2.13.0")))
