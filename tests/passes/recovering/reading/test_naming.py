"""Names in a formula are the user's: of inputs, however they are handed on, and of what is made of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_compiler

SDPA = torch.nn.functional.scaled_dot_product_attention


def _keys(attention_mask: Tensor) -> Tensor:
    return attention_mask[:, None, None, :].bool()


def _by_name(x: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(x, x, x, _keys(attention_mask))


def _by_kwargs(x: Tensor, **given: Tensor) -> Tensor:
    return SDPA(x, x, x, _keys(given["attention_mask"]))


def _by_a_dict_in_a_dict(x: Tensor, batch: dict[str, Any]) -> Tensor:
    return SDPA(x, x, x, _keys(batch["text"]["attention_mask"]))


def _through_a_checkpoint(x: Tensor, attention_mask: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(_by_name, x, attention_mask, use_reentrant=False)
    return found


def _made(x: Tensor, attention_mask: Tensor) -> Tensor:
    lengths = attention_mask.sum(-1)
    marks = torch.zeros(2, 8, dtype=torch.int64)
    marks[torch.arange(2), lengths - 1] = 1
    return SDPA(x, x, x, _keys(marks.flip([-1]).cumsum(-1).flip([-1])))


def _of_two(x: Tensor, attention_mask: Tensor, other: Tensor) -> Tensor:
    return SDPA(x, x, x, _keys((attention_mask * other).cumsum(-1)))


def _loads(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> str:
    reports = attn_compiler.explain(function, torch.ones(2, 1, 8, 8), *args, **kwargs)
    return str(reports[0].sites[0].spec.mask.formula)


MASK = torch.ones(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (_by_name, (MASK,), {}),
        (_by_kwargs, (), {"attention_mask": MASK}),
        (_by_a_dict_in_a_dict, ({"text": {"attention_mask": MASK}},), {}),
        (_through_a_checkpoint, (MASK,), {}),
    ],
)
def test_an_input_has_the_name_that_the_caller_gives_it(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert _loads(function, *args, **kwargs) == "attention_mask[b, k] ≠ 0"


def test_what_is_made_of_one_input_is_named_after_it_and_the_last_op() -> None:
    assert _loads(_made, MASK) == "attention_mask.cumsum[b, 7 - k] ≠ 0"


def test_numbers_with_a_fraction_are_named_as_the_graph_names_them() -> None:
    def added(x: Tensor, slopes: Tensor) -> Tensor:
        return SDPA(x, x, x, _keys(slopes.cumsum(-1)))

    assert _loads(added, torch.ones(2, 8)) == "¬(cumsum[b, k] = 0)"


def test_what_is_made_of_two_is_named_as_the_graph_names_it() -> None:
    assert _loads(_of_two, MASK, MASK + 1) == "cumsum[b, k] ≠ 0"
