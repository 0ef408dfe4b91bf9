"""What cuDNN's graphs take, whatever its version: one plan for one shape, in half precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings.cudnn.takes import TAKES
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.lowerings.shared.limits.takes import check_gpu, refused
from attn_compiler.spec.attention import TensorSpec
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words


def _packed(x: TensorSpec) -> TensorSpec:
    batch, heads, length, width = map(int, x.shape)
    return dataclasses.replace(
        x, shape=(batch, heads, length, width), strides=(heads * length * width, length * width, width, 1)
    )


@pytest.mark.parametrize(
    ("sm", "is_taken"), [(75, False), (80, True), (120, True), (LAST_SM, True), (LAST_SM + 1, False)]
)
def test_it_runs_from_ampere_on(sm: int, is_taken: bool) -> None:
    assert (check_gpu(TAKES, Target.fake(sm=sm)) == []) is is_taken


@pytest.mark.parametrize(
    "spec",
    [
        {"mask": CAUSAL, "changes": (Sinks(requires_grad=False),)},
        {"mask": dense(1, 1, 128, 128, dtype="bfloat16")},
        {"changes": (bias(1, 8, 128, 128),), "dropout_p": 0.1},
        {"dtype": "float16", "head_dim": 256, "head_dim_v": 8},
    ],
    ids=str,
)
def test_it_takes_bands_lengths_and_a_tensor_in_q_s_dtype(spec: dict[str, Any]) -> None:
    asked = make_spec(**spec)
    packed = {name: _packed(getattr(asked, name)) for name in "qkv"}
    assert refused(TAKES, dataclasses.replace(asked, **packed)) == []


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"changes": (Softcap(cap=30.0),)}, "no softcap"),
        ({"mask": dense(1, 1, 128, 128, dtype="float32")}, "the mask is bool or bfloat16"),
        ({"dtype": "float32"}, "observed float32"),
        ({"head_dim": 100}, "multiple of 8"),
        ({"head_dim": 264}, "at most 256"),
        ({"batch": "s0"}, "every size and stride is known"),
        ({"seqlen_kv": "s0"}, "every size and stride is known"),
    ],
)
def test_the_rest_is_refused(spec: dict[str, Any], rule: str) -> None:
    assert rule in words(refused(TAKES, make_spec(**spec)))
