"""What Triton is shown of the numbers of calls that differ in their sizes."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.shared.kernels import tuples
from attn_compiler.lowerings.shared.launching import any_size
from attn_compiler.lowerings.shared.launching.any_size import shown


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"seqlen_q": 32, "seqlen_kv": 48, "heads": 3}, True),
        ({"seqlen_q": 32, "seqlen_kv": 40}, False),
        ({"seqlen_q": 32}, True),
        ({"heads": 32}, False),
    ],
)
def test_which_sort_a_call_is_of(numbers: dict[str, int], expected: bool) -> None:
    assert any_size.are_multiples(numbers) is expected


def test_numbers_say_nothing_but_their_width_and_whether_they_are_one() -> None:
    strides = tuples.DescaleStrides(*[2**31, 48, 1, 0, -(2**31) - 1, -16])
    found = shown((strides, 17, 0, -16, True, 0.5, None), multiples=False)
    assert found == (tuples.DescaleStrides(2**32 + 3, 3, 1, 3, 2**32 + 3, 3), 3, 3, 3, True, 0.5, None)
    assert type(found[0]) is tuples.DescaleStrides


def test_numbers_of_lengths_that_are_multiples_stay_multiples() -> None:
    strides = tuples.GradStrides(grad_b=2**31, grad_h=48, grad_q=17, grad_k=1)
    assert shown((strides, 0), multiples=True) == (tuples.GradStrides(2**32 + 16, 16, 3, 1), 16)


@pytest.mark.parametrize("multiples", [False, True])
def test_strides_of_heads_are_multiples_whatever_the_lengths_are(multiples: bool) -> None:
    assert shown(tuples.Strides(b=48 * 17, h=16, s=48), multiples=multiples) == tuples.Strides(16, 16, 16)
    assert shown(tuples.Strides(b=48 * 17, h=8, s=1), multiples=multiples) == tuples.Strides(3, 3, 1)


@pytest.mark.parametrize("multiples", [False, True])
def test_strides_of_lists_are_anything(multiples: bool) -> None:
    assert shown(tuples.ListStrides(48, 16, 17), multiples=multiples) == tuples.ListStrides(3, 3, 3)
