"""A packed graph stays with kernels for all of its attentions; else the graph is what it was, in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler.passes.matching import match
from attn_compiler.passes.unpad import judging
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from tests.passes.unpad.encoder import MASK, Encoder, check, compiled, ids_of, report


def test_without_a_kernel_that_leaves_rows_out_padding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "LEAVING_OUT", ())
    found = check(Encoder())
    assert found.kept is not None
    assert found.kept.code is Code.PADDING_NO_KERNEL
    # The model's own attentions are decided for as if nobody had tried.
    assert {site.decision.lowering for site in attn_compiler.reports()[-1].sites} != {"untouched"}


def _broken_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks = match.find_sites, []

    def second(*given: Any) -> Any:
        looks.append(given)
        if len(looks) == 2:
            raise KeyError("not packed")
        return run(*given)

    monkeypatch.setattr(match, "find_sites", second)


def test_a_fault_in_looking_at_the_packed_graph_costs_the_packing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken_the_second_time(monkeypatch)
    model = Encoder()
    with pytest.warns(AttnCompilerWarning, match="pass 'unpad' failed at the graph: KeyError: 'not packed'"):
        found = check(model, function=compiled(model, strict=False))
    assert found.kept is not None
    assert found.kept.code is Code.FAULT
    (told,) = [one for one in attn_compiler.reports() if one.unpad is not None]
    assert told.num_sites == len(model.layers)
    assert told.failure is None


def test_such_a_fault_is_raised_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken_the_second_time(monkeypatch)
    with pytest.raises(PassFailed, match="not packed") as caught:
        compiled(Encoder())(ids_of(MASK), MASK)
    assert caught.value.pass_name == "unpad"


def test_an_attention_that_is_not_found_again_keeps_padding_in(monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks = match.find_sites, []

    def fewer(*given: Any) -> Any:
        looks.append(given)
        found = run(*given)
        return type(found)(sites=found.sites[1:], misses=found.misses) if len(looks) == 2 else found

    monkeypatch.setattr(match, "find_sites", fewer)
    found = check(Encoder())
    assert found.kept is not None
    assert found.kept.rule == "each packed attention is understood"


def test_padding_is_out_where_all_have_their_kernels() -> None:
    with torch.no_grad():
        compiled(Encoder())(ids_of(MASK), MASK)
    assert report().kept is None
