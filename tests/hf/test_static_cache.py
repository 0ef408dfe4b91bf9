"""A compiled model that fills a static cache in steps of its own: a prefill, a piece of the prompt, single tokens.

Each layer counts the cache's length up in place, after the mask was made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_compiler
from tests.hf.family import Size
from tests.hf.packages import Unavailable, import_package
from tests.hf.survey import FAMILY

LONGEST = 24
#: tokens of each call
STEPS = (5, 4, 1, 1)
OPTIONS = {"inner": "eager", "strict": True, "verify": True}


def _filled(model: Any, run: Callable[..., Any], ids: torch.Tensor, padding: torch.Tensor | None) -> list[torch.Tensor]:
    """The logits of each step."""
    cache = import_package("transformers").StaticCache(config=model.config, max_cache_len=LONGEST)
    found, end = [], 0
    for tokens in STEPS:
        first, end = end, end + tokens
        given = {} if padding is None else {"attention_mask": padding[:, :end]}
        found.append(run(input_ids=ids[:, first:end], past_key_values=cache, use_cache=True, **given).logits)
    return found


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("family", "padded", "dynamic"), [("llama", False, None), ("gemma3", True, None), ("llama", True, True)]
)
def test_every_step_has_a_proved_mask(family: str, padded: bool, dynamic: bool | None) -> None:
    try:
        model: Any = FAMILY[family].build("sdpa").eval()
    except Unavailable as missing:
        pytest.skip(str(missing))
    ids = FAMILY[family].inputs(Size())["input_ids"]
    padding = torch.ones(ids.shape[0], sum(STEPS), dtype=torch.long) if padded else None
    if padding is not None:
        padding[0, :2] = 0
    torch._dynamo.reset()
    attn_compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="attn_compiler", dynamic=dynamic, options=OPTIONS)
        found, wanted = _filled(model, compiled, ids, padding), _filled(model, model, ids, padding)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    masks = [site.spec.mask for report in attn_compiler.reports() for site in report.sites]
    assert [mask.reason for mask in masks] == [None] * len(masks)
    words = "; ".join(mask.words for mask in masks)
    assert "causal from past_key_values_layers" in words
    assert "keys up to past_key_values_layers" in words
    assert ("key padding" in words) == padded
    assert [check.skipped for check in attn_compiler.verifications() if check.skipped] == []
