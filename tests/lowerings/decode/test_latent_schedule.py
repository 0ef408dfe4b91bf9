"""How the work over a latent is shared out, on every machine that has a row."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.decode import latent_schedule
from attn_compiler.lowerings.decode.latent_schedule import ROWS, schedule
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.lowerings.decode.test_latent import latent_spec

MACHINES = (80, 90, 100, 120)


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_every_machine_has_a_schedule(heads: int, dtype: str, sm: int) -> None:
    found = schedule(latent_spec(heads=heads, dtype=dtype), Target.fake(sm=sm))
    assert found.rows in {row.rows for row in ROWS}
    assert found.keys >= 16
    assert found.splits is not None
    assert found.splits >= 1


def test_hopper_alone_has_tiles_of_more_rows() -> None:
    rows = {sm: schedule(latent_spec(heads=128), Target.fake(sm=sm)).rows for sm in MACHINES}
    assert rows == {80: 16, 90: 64, 100: 16, 120: 16}
    narrow = {heads: schedule(latent_spec(heads=heads), Target.fake(sm=90)).rows for heads in (1, 16, 17, 32, 33)}
    assert narrow == {1: 16, 16: 16, 17: 32, 32: 32, 33: 64}


def test_kernels_begin_early_on_the_gpus_of_data_centers_since_hopper() -> None:
    assert [schedule(latent_spec(), Target.fake(sm=sm)).early for sm in MACHINES] == [False, True, True, False]


def test_lengths_that_are_not_known_are_left_to_the_launch() -> None:
    assert schedule(unknown_keys(latent_spec()), Target.fake(sm=90)).splits is None


def unknown_keys(spec: AttentionSpec) -> AttentionSpec:
    k, v = (dataclasses.replace(x, shape=(*x.shape[:2], "s0", x.shape[3])) for x in (spec.k, spec.v))
    return dataclasses.replace(spec, k=k, v=v)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (dataclasses.replace(latent_spec(), latent=None), "the site has no latent"),
        (latent_spec(rank=1024), "no schedule for a latent of 1024 in bfloat16"),
        (latent_spec(dtype="float64"), "no schedule for a latent of 512 in float64"),
    ],
)
def test_what_has_no_row(spec: AttentionSpec, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        latent_schedule.schedule(spec, Target.fake(sm=90))
