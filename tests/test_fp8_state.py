from __future__ import annotations

import gc

import pytest
import torch

from attn_compiler import fp8_state
from attn_compiler.errors import Fp8StateMismatch
from attn_compiler.fp8_state import fp8_state_dict, keep, load_fp8_state_dict


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_state, "_kept", [])


def test_what_is_kept_is_copied_out_and_written_in_place() -> None:
    one, other = torch.ones(4, 1), torch.zeros(4, 2)
    keep("a/amax_q", one)
    keep("a/amax_k", other)
    saved = fp8_state_dict()
    one.fill_(7.0)
    assert torch.equal(saved["a/amax_q"], torch.ones(4, 1))
    load_fp8_state_dict(saved)
    assert torch.equal(one, torch.ones(4, 1))


def test_several_of_one_path_are_numbered() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    keep("a/amax_q", first)
    keep("a/amax_q", second)
    assert {name: float(x) for name, x in fp8_state_dict().items()} == {"a/amax_q": 1.0, "a/amax_q#2": 0.0}


def test_what_no_graph_holds_any_more_is_forgotten() -> None:
    gone, here = torch.ones(1), torch.zeros(1)
    keep("a/amax_q", gone)
    keep("b/amax_q", here)
    del gone
    gc.collect()
    assert list(fp8_state_dict()) == ["b/amax_q"]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "not given: .*a/amax_q"),
        ({"a/amax_q": torch.ones(2), "c": torch.ones(1)}, "not there: .*'c'"),
        ({"a/amax_q": torch.ones(3)}, r"\(2,\), given is \(3,\)"),
    ],
)
def test_other_histories_are_refused_and_nothing_is_written(state: dict[str, torch.Tensor], named: str) -> None:
    history = torch.zeros(2)
    keep("a/amax_q", history)
    with pytest.raises(Fp8StateMismatch, match=named):
        load_fp8_state_dict(state)
    assert not history.any()
