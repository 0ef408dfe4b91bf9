"""Which attention over a latent goes to the kernel for Hopper, and with how many splits; of all else, why it does not."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.decode import latent_hopper, latent_schedule
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import ScoreSpec, Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.decode.test_latent import latent_spec
from tests.lowerings.decode.test_latent_schedule import unknown_keys
from tests.lowerings.specs import dense

H200 = Target.fake(sm=90, processors=132)
SERVED = latent_spec(heads=128)


def _scored(**given: object) -> AttentionSpec:
    return dataclasses.replace(SERVED, score=dataclasses.replace(ScoreSpec(scale=0.1), **given))


@pytest.mark.parametrize("heads", [33, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_it_takes(heads: int, dtype: str) -> None:
    spec = latent_spec(heads=heads, dtype=dtype)
    assert latent_hopper.refused(spec, H200) == []
    assert latent_schedule.schedule(spec, H200).hopper
    assert latent_hopper.note([]).startswith("the kernel for Hopper")


@pytest.mark.parametrize(
    ("spec", "target", "code", "observed"),
    [
        (SERVED, Target.fake(sm=80), Code.ARCHITECTURE, "sm80"),
        (SERVED, Target.fake(sm=100), Code.ARCHITECTURE, "sm100"),
        (SERVED, dataclasses.replace(H200, triton="3.5.1"), Code.LIBRARY_VERSION, "3.5.1"),
        (SERVED, dataclasses.replace(H200, triton_interpreted=True), Code.ARCHITECTURE, "Triton's interpreter"),
        (latent_spec(heads=128, dtype="float32"), H200, Code.DTYPE, "float32"),
        (latent_spec(heads=128, rank=256), H200, Code.LATENT, "256 and 64"),
        (latent_spec(heads=128, rope=32), H200, Code.LATENT, "512 and 32"),
        (latent_spec(heads=128, rope=0), H200, Code.LATENT, "512 and 0"),
        (latent_spec(heads=32), H200, Code.LATENT, "32 heads"),
        (latent_spec(heads=128, queries=2), H200, Code.LENGTHS, "seqlen_q 2"),
        (dataclasses.replace(SERVED, mask=dense(1, 1, 1, 4096)), H200, Code.MASK_KIND, "keys: dense bool"),
        (_scored(changes=(Sinks(requires_grad=False),)), H200, Code.SINKS, "one learned logit"),
        (_scored(changes=(Softcap(cap=30.0),)), H200, Code.SOFTCAP, "30"),
        (_scored(scale=-0.1), H200, Code.SCALE, "-0.1"),
        (_scored(scale=1e-35), H200, Code.SCALE, "1e-35"),
    ],
)
def test_what_it_refuses_goes_to_the_triton_kernel(
    spec: AttentionSpec, target: Target, code: Code, observed: str
) -> None:
    reasons = latent_hopper.refused(spec, target)
    assert [reason.code for reason in reasons] == [code]
    assert observed in reasons[0].observed
    found = latent_schedule.schedule(spec, target)
    assert found == latent_schedule.of_triton(spec, target)
    assert not found.hopper
    assert str(reasons[0]) in latent_hopper.note(reasons)


def test_a_site_without_a_latent_is_not_asked_about() -> None:
    without = dataclasses.replace(SERVED, latent=None)
    for ask in (latent_hopper.refused, latent_schedule.of_triton):
        with pytest.raises((ValueError, LookupError), match="the site has no latent"):
            ask(without, H200)


@pytest.mark.parametrize(
    ("heads", "batch", "keys", "splits"),
    [
        (128, 16, 4096, 4),
        (128, 16, 32768, 4),
        (128, 64, 4096, 1),
        (128, 64, 32768, 1),
        (128, 1, 4096, 32),
        (128, 1, 32768, 66),
        (64, 16, 4096, 8),
        (64, 16, 32768, 8),
    ],
)
def test_it_is_given_as_many_splits_as_were_the_fastest(heads: int, batch: int, keys: int, splits: int) -> None:
    found = latent_schedule.schedule(latent_spec(heads=heads, batch=batch, keys=keys), H200)
    assert (found.hopper, found.rows, found.splits) == (True, 64, splits)


def test_lengths_that_are_not_known_leave_the_splits_to_the_launch() -> None:
    found = latent_schedule.schedule(unknown_keys(SERVED), H200)
    assert (found.hopper, found.splits) == (True, None)


@pytest.mark.parametrize(
    ("rows", "splits", "parts", "columns"),
    [(2048, 4, 4, 512), (1024, 8, 8, 512), (256, 8, 8, 128), (128, 32, 32, 32), (128, 66, 64, 32), (2048, 2, 4, 512)],
)
def test_few_programs_add_up_what_many_rows_leave(rows: int, splits: int, parts: int, columns: int) -> None:
    schedule = latent_schedule.schedule(SERVED, H200)
    assert latent_schedule.merging(schedule, rows=rows, splits=splits, width=512) == (parts, columns)


def test_no_program_adds_up_more_dims_than_there_are() -> None:
    schedule = latent_schedule.schedule(SERVED, H200)
    assert latent_schedule.merging(schedule, rows=4096, splits=4, width=64) == (4, 64)
