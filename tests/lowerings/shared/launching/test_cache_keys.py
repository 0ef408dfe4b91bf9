"""A kernel has one key, whatever was asked for before it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.shared.launching import cache_keys
from tests.lowerings.shared import settled_keys
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by


@of_a_known_compiler
def test_keys_are_the_same_in_every_order() -> None:
    settled, left = printed_by(settled_keys)
    first, second = settled["keys"]
    assert first == second
    assert len(set(first.values())) == len(settled_keys.KERNELS)
    # Without it they are not. Where this fails, Triton does it by itself, and the module can go.
    assert left["keys"][0] != left["keys"][1]


def test_what_is_interpreted_has_no_key() -> None:
    cache_keys.settle(object())
