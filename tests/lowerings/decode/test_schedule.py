from __future__ import annotations

import itertools

import pytest

from attn_compiler.lowerings.decode import schedule
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [Target.fake(), Target.fake(sm=80, processors=108), Target.fake(device="cpu")])
def test_every_shape_has_a_schedule(dtype: str, target: Target) -> None:
    widest = 256 if dtype == "float32" else 512
    for qk, v, seqlen_q in itertools.product((1, 64, 72, 128, 192, 256, widest), (16, 128, widest), (1, 16)):
        spec = make_spec(head_dim=qk, head_dim_v=v, seqlen_q=seqlen_q, seqlen_kv=4096, dtype=dtype)
        found = schedule.schedule(spec, target)
        assert found.least_keys >= found.keys >= 16
        assert found.splits is not None
        assert found.splits >= 1


def test_what_is_wider_than_any_row_has_none() -> None:
    with pytest.raises(LookupError, match="520"):
        schedule.schedule(make_spec(head_dim=520), Target.fake())


def splits(batch: Dim, seqlen_kv: Dim, target: Target) -> int | None:
    spec = make_spec(batch=batch, heads=32, heads_kv=8, head_dim=128, seqlen_q=1, seqlen_kv=seqlen_kv)
    return schedule.schedule(spec, target).splits


def test_few_sequences_are_split_often_and_many_are_not() -> None:
    found = [splits(batch, 8192, Target.fake()) for batch in (1, 4, 16, 256)]
    assert None not in found
    assert found == sorted(found, key=lambda n: -(n or 0))
    assert found[-1] == 1
    assert (found[0] or 0) > 8


def test_a_smaller_machine_has_fewer_splits() -> None:
    assert (splits(1, 32768, Target.fake(processors=60)) or 0) < (splits(1, 32768, Target.fake()) or 0)


@pytest.mark.parametrize(("batch", "seqlen_kv"), [("s0", 4096), (1, "s0 + 1"), ("s0", "s1")])
def test_unknown_sizes_are_left_to_the_launch(batch: Dim, seqlen_kv: Dim) -> None:
    assert splits(batch, seqlen_kv, Target.fake()) is None
