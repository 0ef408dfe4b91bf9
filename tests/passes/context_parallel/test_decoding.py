"""Each rank attends to its own slots of a cache, and what they merge is the attention over all of it."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.distributed import processes
from tests.passes.context_parallel import decoded
from tests.passes.context_parallel.decoded import KEPT, RIGHT, Found
from tests.thinned import asked_for, further

#: a mask of each sort, what is added, sinks, what is verified, and Inductor
_DAILY = ("filled", "left padding", "filled, Inductor", "no keys", "ALiBi", "sinks, verified", "mask from outside")
_THREE = ["filled", "left padding", "keys of one rank", "no keys", "sinks", "causal flag"]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    return processes.run(decoded.measured, asked_for(request, "name"), size=2)


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    return processes.run(decoded.measured, asked_for(request, "name", _THREE), size=3)


def _check(found: Found, name: str) -> None:
    assert found.error < 1e-12
    assert any("ranks attends to the keys that it keeps" in note for note in found.notes), found.notes
    if RIGHT[name].inner != "inductor":
        assert "keys_of_slots" not in found.calls
        assert found.calls.count("merged_over_ranks") == 1
    assert found.checked == RIGHT[name].verify


@pytest.mark.parametrize("name", further(RIGHT, daily=_DAILY))
def test_two_ranks_merge_what_they_keep(two: list[dict[str, Found]], name: str) -> None:
    for rank in two:
        _check(rank[name], name)


@pytest.mark.parametrize("name", further(_THREE, daily=_DAILY))
def test_so_do_three(three: list[dict[str, Found]], name: str) -> None:
    for rank in three:
        _check(rank[name], name)


@pytest.mark.parametrize("name", KEPT)
def test_what_can_not_be_merged_gathers_and_says_why(two: list[dict[str, Found]], name: str) -> None:
    _, words = KEPT[name]
    for rank in two:
        found = rank[name]
        assert found.error < 1e-12
        assert "merged_over_ranks" not in found.calls
        assert any("gathered in each call" in note and words in note for note in found.notes), found.notes


def test_what_is_merged_wrongly_is_an_error_on_every_rank() -> None:
    for said in processes.run(decoded.mismatch, size=2):
        assert "output" in said
        assert "on rank 0" in said


@pytest.mark.parametrize("name", ["left padding"])
def test_masks_are_proved_at_the_positions_of_slots(two: list[dict[str, Found]], name: str) -> None:
    (mask,) = two[0][name].masks
    assert "proved" in mask
    assert "2·k" in mask


@pytest.mark.parametrize(
    "name", further(["everything", "filled", "left padding", "mask from outside", "softcap", "sinks"], daily=_DAILY)
)
def test_the_decode_kernel_takes_what_a_rank_is_left_with(two: list[dict[str, Found]], name: str) -> None:
    (text,) = two[0][name].specs
    spec = AttentionSpec.from_text(text)
    half = {x: dataclasses.replace(getattr(spec, x), dtype="bfloat16") for x in "qkv"}
    on_gpu = dataclasses.replace(spec, **half, device="cuda", out_dtype="bfloat16")
    assert on_gpu.lse == "read"
    assert by_name("decode").why_not(on_gpu, Target.fake()) == []


@pytest.mark.parametrize("name", further(["filled", "filled, several queries", "causal flag"], daily=_DAILY))
def test_what_is_not_filled_yet_is_an_interval_of_slots(two: list[dict[str, Found]], name: str) -> None:
    """So kernels read no tensor for the mask, and no slot that is empty."""
    (text,) = two[0][name].specs
    found = parts.make_plan(AttentionSpec.from_text(text))
    assert found.rows
    assert not found.mask
