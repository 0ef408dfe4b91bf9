"""Rows of parameters: what transformers' functions have, and which comes first."""

from __future__ import annotations

import inspect

import pytest

from attn_compiler.passes.matching.linear import looking
from attn_compiler.passes.matching.linear.templates import TEMPLATES
from tests.near_miss import linear_variants
from tests.passes.matching.linear import linear_functions


@pytest.mark.parametrize("name", linear_variants._PARTS)
def test_each_function_of_transformers_has_a_row(name: str) -> None:
    template = looking.template_of(linear_variants.own(name))
    assert template is not None
    assert template.by_token is (
        name not in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
    )


def test_a_row_with_more_parameters_comes_before_one_with_fewer() -> None:
    for place, one in enumerate(TEMPLATES):
        assert not any(other.parameters < one.parameters for other in TEMPLATES[:place])


def test_optional_roles_are_roles() -> None:
    for one in TEMPLATES:
        assert one.optional <= one.operands.keys()


def test_other_parameters_are_none_of_ours() -> None:
    assert looking.template_of(linear_functions.plain) is None
    assert looking.template_of(linear_functions.by_token) is TEMPLATES[1]
    assert "query" in inspect.signature(linear_functions.plain).parameters
