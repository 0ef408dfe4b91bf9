from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

import attn_compiler
from attn_compiler.passes.writing import fp8_state
from attn_compiler.passes.writing.fp8_state import Home, find, fp8_state_dict, load_fp8_state_dict, others, register
from attn_compiler.reasons.fp8_errors import Fp8StateInvalid, Fp8StateMismatch, Fp8StateOutdated

pytestmark = pytest.mark.usefixtures("little_to_look_through")


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_state, "_kept", [])


def test_what_is_kept_is_copied_out_and_written_in_place() -> None:
    one, other = torch.ones(4, 1), torch.zeros(4, 2)
    register("a/amax", one)
    register("c/amax", other)
    saved = fp8_state_dict()
    one.fill_(7.0)
    assert torch.equal(saved["a/amax"], torch.ones(4, 1))
    load_fp8_state_dict(saved)
    assert torch.equal(one, torch.ones(4, 1))


def test_several_of_one_path_are_numbered() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    register("a/amax", first)
    register("a/amax", second)
    assert {name: float(x) for name, x in fp8_state_dict().items()} == {"a/amax": 1.0, "a/amax#2": 0.0}


def test_what_no_graph_holds_any_more_is_forgotten() -> None:
    """Graphs are cycles: nobody may have collected those of a model that is gone, and names would count them."""
    gone, here = {"tensor": torch.ones(1)}, torch.zeros(1)
    gone["itself"] = gone  # type: ignore[assignment]
    register("a/amax", gone["tensor"])
    register("a/amax", here)
    gc.disable()
    try:
        del gone
        assert list(fp8_state_dict()) == ["a/amax"]
    finally:
        gc.enable()


def test_what_is_not_there_on_one_side_may_be_left_out() -> None:
    """A graph for inference, say, that has not run yet."""
    history, other = torch.zeros(2), torch.zeros(1)
    register("a/amax", history)
    register("b/amax", other)
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
    register("a/amax", history)
    with pytest.raises(Fp8StateMismatch, match=named):
        load_fp8_state_dict(state)
    assert not history.any()


def test_histories_of_an_earlier_version_say_how_to_join_them() -> None:
    """Which had one for each of q, k and v, and what the error says to do is right."""
    own = {"a/amax": torch.zeros(4, 6), "a/amax#2": torch.zeros(4, 6)}
    for history in own.values():
        register("a/amax", history)
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


# ---- what is loaded is checked, and all of it or nothing is written ----------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (torch.tensor([1.0, math.inf]), "b/amax holds inf"),
        (torch.tensor([math.nan, 1.0]), "b/amax holds nan"),
        (torch.tensor([1.0, -2.0]), "b/amax holds -2"),
        (torch.tensor([-math.inf, 1.0]), "b/amax holds -inf"),
        (torch.ones(2, dtype=torch.complex64), "b/amax is complex64"),
        (torch.ones(2, dtype=torch.float64), "b/amax is float64"),
        (torch.ones(2, dtype=torch.bfloat16), "b/amax is bfloat16"),
        (torch.ones(2, dtype=torch.int64), "b/amax is int64"),
        (torch.ones(2, device="meta"), "b/amax holds no numbers"),
        (torch.ones(2).to_sparse(), "b/amax is no plain tensor"),
        ([1.0, 1.0], "b/amax is no plain tensor but list"),
        (None, "b/amax is no plain tensor but NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_history_can_hold_is_refused_and_nothing_is_written(given: Any, named: str, strict: bool) -> None:
    """Inf, for one, would give outputs that are not finite for as many steps as a history has."""
    one, other = torch.zeros(2), torch.zeros(2)
    register("a/amax", one)
    register("b/amax", other)
    with pytest.raises(Fp8StateInvalid, match=named) as caught:
        load_fp8_state_dict({"a/amax": torch.ones(2), "b/amax": given}, strict=strict)
    assert "Nothing was loaded" in str(caught.value)
    assert not one.any()
    assert not other.any()


def test_a_shape_that_does_not_fit_costs_all_of_them() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    register("a/amax", one)
    register("b/amax", other)
    for strict in (True, False):
        with pytest.raises(Fp8StateMismatch, match=r"b/amax is \(2,\), given is \(1, 2\).*Nothing was loaded"):
            load_fp8_state_dict({"a/amax": torch.ones(2), "b/amax": torch.ones(1, 2)}, strict=strict)
    assert not one.any()


def test_what_is_on_one_side_alone_is_not_looked_at() -> None:
    """As the message says of strict=False."""
    history, untouched = torch.zeros(2), torch.full((2,), 5.0)
    register("a/amax", history)
    register("b/amax", untouched)
    given = {"a/amax": torch.ones(2), "gone/amax": torch.tensor([math.nan])}
    assert load_fp8_state_dict(given, strict=False) == ("a/amax",)
    assert history.all()
    assert untouched.tolist() == [5.0, 5.0]
    assert load_fp8_state_dict({"gone/amax": torch.ones(9)}, strict=False) == ()


def test_a_write_that_fails_half_way_is_taken_back() -> None:
    one, other = torch.full((2,), 3.0), torch.full((2,), 4.0)
    register("a/amax", one)
    register("b/amax", other)
    copy, calls = torch.Tensor.copy_, []

    def fails_once(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        calls.append(target)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return copy(target, source)

    with mock.patch.object(torch.Tensor, "copy_", fails_once), pytest.raises(RuntimeError, match="out of memory"):
        load_fp8_state_dict({"a/amax": torch.ones(2), "b/amax": torch.ones(2)})
    assert (one.tolist(), other.tolist()) == ([3.0, 3.0], [4.0, 4.0])


def test_what_is_given_may_be_a_view_of_what_is_there_or_want_gradients() -> None:
    both = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    register("a/amax", both)
    load_fp8_state_dict({"a/amax": both.t()})
    assert both.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    load_fp8_state_dict({"a/amax": torch.ones(2, 2, requires_grad=True)})
    assert both.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not both.requires_grad


def test_numbers_of_an_earlier_version_say_what_they_are() -> None:
    history = torch.zeros(2)
    register("a/amax", history)
    with pytest.raises(Fp8StateMismatch, match=r"not there: \['a/amax#2'\].*earlier version.*give their model"):
        load_fp8_state_dict({"a/amax": torch.ones(2), "a/amax#2": torch.ones(2)})


# ---- whose they are ---------------------------------------------------------------------------------------------------


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))


def home(module: torch.nn.Module, place: int = 0, kind: str = "recipe") -> Home:
    return Home(owner=weakref.ref(module), place=place, kind=kind)


def test_a_history_is_found_by_its_module_place_and_kind_alone() -> None:
    model, history = Pair(), torch.zeros(1)
    register("0/amax", history, home(model.layers[0]))
    assert find(home(model.layers[0])) is history
    for other in (home(model.layers[1]), home(model.layers[0], 1), home(model.layers[0], 0, "other"), None):
        assert find(other) is None


def test_names_with_a_model_do_not_depend_on_what_was_compiled_first() -> None:
    """Layers that are compiled one by one name themselves alike."""
    model, histories = Pair(), [torch.zeros(1), torch.ones(1)]
    for i in (1, 0):
        register("(no module)/amax", histories[i], home(model.layers[i]))
    assert list(fp8_state_dict()) == ["(no module)/amax", "(no module)/amax#2"]
    saved = fp8_state_dict(model)
    assert {name: float(x) for name, x in saved.items()} == {"layers.0/amax": 0.0, "layers.1/amax": 1.0}
    for history in histories:
        history.fill_(7.0)
    assert set(load_fp8_state_dict(saved, model)) == {"layers.0/amax", "layers.1/amax"}
    assert [float(x) for x in histories] == [0.0, 1.0]


def test_of_two_models_each_has_its_own_and_wrappers_do_not_count() -> None:
    models, histories = [Pair(), Pair()], [torch.zeros(1), torch.ones(1)]
    for model, history in zip(models, histories, strict=True):
        register("layers.0/amax", history, home(model.layers[0]))
    register("(no module)/amax", histories[0])
    assert [float(fp8_state_dict(model)["layers.0/amax"]) for model in models] == [0.0, 1.0]
    compiled = torch.compile(models[1], backend="eager")
    assert list(fp8_state_dict(compiled)) == ["layers.0/amax"]
    assert list(fp8_state_dict(models[0].layers[0])) == ["layers.0/amax"]
    assert fp8_state_dict(torch.nn.Linear(1, 1)) == {}


def test_what_can_not_be_shared_has_its_reason() -> None:
    module, history = torch.nn.Identity(), torch.zeros(1)
    assert others("a/amax", home(module), training=True) is None
    register("a/amax", history, home(module), training=True)
    assert others("a/amax", home(module, 0, "other"), training=True) is not None
    assert "another place" in str(others("a/amax", home(module, 1), training=False))
    # A second attention of the module, behind a graph break.
    assert others("a/amax", home(module, 1), training=True) is None
    assert others("a/amax", home(torch.nn.Identity()), training=False) is None
    assert others("b/amax", None, training=False) is None
    register("b/amax", torch.zeros(1))
    kept = torch.zeros(1)
    register("b/amax", kept)
    assert "not known" in str(others("b/amax", None, training=False))
