"""The releases of Triton that a family's kernels are known with: what is said of them, and that every launch says what it wants."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings import LOWERINGS
from attn_compiler.lowerings.shared.limits import triton_releases
from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED, Release
from attn_compiler.spec.target import Target


@pytest.mark.parametrize(
    ("releases", "said"),
    [(((3, 6),), "3.6"), (((3, 6), (3, 10)), "3.6 or 3.10"), (((3, 6), (3, 7), (3, 9)), "3.6, 3.7 or 3.9")],
)
def test_words(releases: tuple[Release, ...], said: str) -> None:
    assert triton_releases.words(releases) == said


def test_the_remedy_is_the_newest() -> None:
    assert triton_releases.remedy(((3, 6), (3, 10))) == "pip install 'triton==3.10.*'"


@pytest.mark.parametrize("name", COMPILED)
def test_they_are_in_order(name: str) -> None:
    assert list(COMPILED[name]) == sorted(set(COMPILED[name]))


def test_every_lowering_that_needs_triton_has_a_line() -> None:
    """Without Triton on Hopper it is unavailable, and with it not."""
    without, with_it = Target.fake(triton=""), Target.fake(triton="3.7.1")
    of_triton = {x.name for x in LOWERINGS if x.unavailable(without) and not x.unavailable(with_it)}
    assert of_triton == set(COMPILED) - {"decode_latent_sm90"}
