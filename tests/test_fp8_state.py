from __future__ import annotations

import gc

import pytest
import torch

import attn_compiler
from attn_compiler import fp8_state
from attn_compiler.errors import Fp8StateMismatch, Fp8StateOutdated
from attn_compiler.fp8_state import fp8_state_dict, keep, load_fp8_state_dict


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_state, "_kept", [])


def test_what_is_kept_is_copied_out_and_written_in_place() -> None:
    one, other = torch.ones(4, 1), torch.zeros(4, 2)
    keep("a/amax", one)
    keep("c/amax", other)
    saved = fp8_state_dict()
    one.fill_(7.0)
    assert torch.equal(saved["a/amax"], torch.ones(4, 1))
    load_fp8_state_dict(saved)
    assert torch.equal(one, torch.ones(4, 1))


def test_several_of_one_path_are_numbered() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    keep("a/amax", first)
    keep("a/amax", second)
    assert {name: float(x) for name, x in fp8_state_dict().items()} == {"a/amax": 1.0, "a/amax#2": 0.0}


def test_what_no_graph_holds_any_more_is_forgotten() -> None:
    """Graphs are cycles: nobody may have collected those of a model that is gone, and names would count them."""
    gone, here = {"tensor": torch.ones(1)}, torch.zeros(1)
    gone["itself"] = gone  # type: ignore[assignment]
    keep("a/amax", gone["tensor"])
    keep("a/amax", here)
    gc.disable()
    try:
        del gone
        assert list(fp8_state_dict()) == ["a/amax"]
    finally:
        gc.enable()


def test_what_is_not_there_on_one_side_may_be_left_out() -> None:
    """A graph for inference, say, that has not run yet."""
    history, other = torch.zeros(2), torch.zeros(1)
    keep("a/amax", history)
    keep("b/amax", other)
    load_fp8_state_dict({"a/amax": torch.ones(2), "a/amax#2": torch.ones(2)}, strict=False)
    assert history.all()
    assert not other.any()
    with pytest.raises(Fp8StateMismatch, match=r"\(2,\), given is \(3,\)"):
        load_fp8_state_dict({"a/amax": torch.ones(3)}, strict=False)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "not given: .*a/amax.*strict=False"),
        ({"a/amax": torch.ones(2), "c": torch.ones(1)}, "not there: .*'c'"),
        ({"a/amax": torch.ones(3)}, r"\(2,\), given is \(3,\)"),
    ],
)
def test_other_histories_are_refused_and_nothing_is_written(state: dict[str, torch.Tensor], named: str) -> None:
    history = torch.zeros(2)
    keep("a/amax", history)
    with pytest.raises(Fp8StateMismatch, match=named):
        load_fp8_state_dict(state)
    assert not history.any()


def test_histories_of_an_earlier_version_say_how_to_join_them() -> None:
    """Which had one for each of q, k and v, and what the error says to do is right."""
    own = {"a/amax": torch.zeros(4, 6), "a/amax#2": torch.zeros(4, 6)}
    for history in own.values():
        keep("a/amax", history)
    numbers = {"q": 1.0, "k": 2.0, "v": 3.0}
    state = {f"a/amax_{x}{which}": torch.full((4, 2), n) for x, n in numbers.items() for which in ("", "#2")}
    with pytest.raises(Fp8StateOutdated, match=r"'a/amax_k'.*one for all three \('a/amax' \(4, 6\)") as caught:
        load_fp8_state_dict(state)
    assert not own["a/amax"].any()
    remedy = str(caught.value).split("load that: ")[1].split("; or")[0]
    joined = eval(remedy, {"torch": torch, "attn_compiler": attn_compiler, "state": state})
    load_fp8_state_dict(joined)
    assert own["a/amax#2"][0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_histories_of_an_earlier_version_before_there_are_any() -> None:
    with pytest.raises(Fp8StateOutdated, match="run the model once first"):
        load_fp8_state_dict({"a/amax_q": torch.zeros(4, 2)})
