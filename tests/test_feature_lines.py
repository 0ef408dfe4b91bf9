"""The table of lines by feature counts every file once."""

from __future__ import annotations

import pytest

from tests import feature_lines
from tests.feature_lines import feature_of
from tests.test_layout import LINES


@pytest.mark.parametrize(
    ("path", "feature"),
    [
        ("attn_compiler/lowerings/hopper/fp8.py", "FP8"),
        ("attn_compiler/lowerings/linear/table.py", "linear attention"),
        ("attn_compiler/index_expr/linear_forms.py", "index expressions"),
        ("tests/verifying/test_masks.py", "verify"),
        ("attn_compiler/spec/dims.py", "everything else"),
    ],
)
def test_the_first_pattern_counts(path: str, feature: str) -> None:
    assert feature_of(path) == feature


def test_every_line_is_of_one_feature() -> None:
    counts = feature_lines.counted()
    assert sum(count["attn_compiler"] for count in counts.values()) <= sum(LINES.values())
    assert not [feature for feature, count in counts.items() if not count.total()]
