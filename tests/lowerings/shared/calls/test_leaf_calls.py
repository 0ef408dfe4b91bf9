"""The arguments are the schemas', and a body and a place in compiled code replay what was kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.calls.leaf_calls import (
    BackwardArguments,
    BackwardBody,
    ForwardArguments,
    ForwardBody,
    Gradients,
    Outputs,
    or_else,
)
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.noting import noting
from attn_compiler.lowerings.shared.launching.on_device import Empty, KnownCalls
from attn_compiler.lowerings.shared.launching.replaying import Alike, Start
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.reasons.errors import AttnCompilerWarning


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_ALIKE", KnownCalls())
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: 0)


class Doubles:
    """A launch that writes twice q to what is made, and keeps the addresses that it is given."""

    runs: list[list[int]] = []  # noqa: RUF012 - the tests' own

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        def start(tensors: list[Tensor], addresses: list[int]) -> None:
            self.runs.append(addresses.copy())
            tensors[index["made"]].copy_(tensors[index["q"]] * 2)

        return start


class Forward(ForwardBody):
    """Its lse is left out. firsts: of calls that were not replayed."""

    firsts: list[str] = []  # noqa: RUF012

    def first(self, given: ForwardArguments, same: Alike) -> Outputs:
        self.firsts.append(given.text)
        same.device, same.empties = torch.device("cpu", 0), {"made": Empty.like(given.q)}
        same.keep([Doubles()], inputs=("q", "k", "v", "mask"), returned=("made", None))
        return given.q * 2, torch.zeros(given.q.shape[:3])

    def definition(self, given: ForwardArguments) -> Attention:
        return Attention(q=given.q, k=given.k, v=given.v, tensors={}, scale=1.0)


class Backward(BackwardBody):
    def first(self, given: BackwardArguments, same: Alike) -> Gradients:
        same.device, same.empties = torch.device("cpu", 0), {"made": Empty.like(given.q)}
        names = ("grad_out", "grad_lse", "q", "k", "v", "out", "lse", "bias")
        same.keep([Doubles()], inputs=names, returned=("made", "k", "v", ["bias"]))
        return given.q * 2, given.k, given.v, [*given.operands]

    def definition(self, given: BackwardArguments) -> Attention:
        return Attention(q=given.q, k=given.k, v=given.v, tensors={}, scale=1.0)

    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        return ()


FORWARD, BACKWARD = Forward(op="op"), Backward(op="op_backward")


def bhsd(value: float = 1.0) -> Tensor:
    return torch.full((1, 2, 8, 4), value)


def between() -> Tensor:
    return torch.ones(65)[1:].view(1, 2, 8, 4)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    Doubles.runs.clear()
    Forward.firsts.clear()


@pytest.mark.parametrize(
    ("schema", "arguments"), [(ops.LEAF_SCHEMA, ForwardArguments), (ops.BACKWARD_SCHEMA, BackwardArguments)]
)
def test_arguments_are_the_schemas(schema: str, arguments: Any) -> None:
    named = [one.split()[-1] for one in schema.split(" -> ")[0].strip("()").split(", ")]
    assert ["spec" if name == "text" else name for name in arguments._fields] == named


def test_inputs_are_all_tensors_in_order() -> None:
    q, k, v, out, grad, lse, mask, bias = (torch.tensor(i) for i in range(8))
    assert leaf_calls.forward_inputs((q, k, v, [mask, bias], "text")) == [q, k, v, mask, bias]
    assert leaf_calls.forward_inputs((q, k, v, [], "text")) == [q, k, v]
    found = leaf_calls.backward_inputs((grad, lse, q, k, v, [mask, bias], out, lse, "text"))
    assert found == [grad, lse, q, k, v, out, lse, mask, bias]


def test_a_body_replays_calls_that_lie_alike() -> None:
    for value in (1.0, 3.0):
        out, lse = FORWARD(bhsd(value), bhsd(), bhsd(), [bhsd()], "text")
        assert out.unique().item() == 2 * value
        assert (lse.shape, lse.dtype) == ((1, 2, 8), torch.float32)
    assert (Forward.firsts, len(Doubles.runs)) == (["text"], 1)


def test_an_lse_that_nothing_reads_is_on_the_output_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be the current device."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def new_lse(out: Tensor) -> Tensor:
        assert current == [out.device]
        return torch.zeros(out.shape[:3])

    monkeypatch.setattr(leaf_calls, "on", on, raising=False)
    monkeypatch.setattr(leaf_calls, "new_lse", new_lse)
    for _ in range(2):
        FORWARD(bhsd(), bhsd(), bhsd(), [bhsd()], "text")
    assert len(Doubles.runs) == 1


def test_a_backward_gives_gradients_of_operands_in_a_list() -> None:
    lse = torch.zeros(1, 2, 8)
    for value in (1.0, 3.0):
        q, k, v, bias = bhsd(value), bhsd(), bhsd(), bhsd()
        *grads, further = BACKWARD(bhsd(), lse, q, k, v, [bias], bhsd(), lse, "text")
        assert grads[0].unique().item() == 2 * value
        assert grads[1] is k
        assert grads[2] is v
        assert further[0] is bias
    assert len(Doubles.runs) == 1


def test_a_place_asks_for_addresses_alone_after_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lse = torch.zeros(1, 2, 8)
    place, backward = leaf_calls.ForwardSite(FORWARD), leaf_calls.BackwardSite(BACKWARD)
    place(bhsd(), bhsd(), bhsd(), [bhsd()], "text")
    backward(bhsd(), lse, bhsd(), bhsd(), bhsd(), [bhsd()], bhsd(), lse, "text")
    assert not Doubles.runs
    monkeypatch.setattr(leaf_calls, "alike", None)
    given = (bhsd(3.0), bhsd(), bhsd(), [bhsd()])
    out, nothing = place(*given, "text")
    assert nothing is None
    assert Doubles.runs == [[x.data_ptr() for x in (*given[:3], *given[3], out)]]
    *grads, further = backward(bhsd(), lse, *given, out, lse, "text")
    assert grads[0].unique().item() == 6
    assert further[0] is given[3][0]


def test_a_place_calls_its_body_for_what_begins_between_vectors() -> None:
    place, rest = leaf_calls.ForwardSite(FORWARD), (bhsd(), bhsd(), [bhsd()], "text")
    place(between(), *rest)
    assert len(Forward.firsts) == 1
    place(bhsd(), *rest)
    assert len(Forward.firsts) == 2, "nothing is learned from tensors that begin between vectors"
    replay = place.replay
    place(between(), *rest)
    place(bhsd(), *rest)
    assert len(Forward.firsts) == 2
    assert place.replay is replay is not None


@pytest.fixture
def failures() -> Iterator[None]:
    yield
    FAILURES.forget()


def _raise(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.usefixtures("failures")
def test_what_fails_once_is_not_tried_again() -> None:
    tried: list[str] = []

    def launch() -> str:
        tried.append("launch")
        raise RuntimeError("no")

    with pytest.warns(AttnCompilerWarning, match="'op' did not start: RuntimeError: no"):
        assert or_else("op", "a text", launch, lambda: "instead") == "instead"
    assert or_else("op", "a text", launch, lambda: "instead") == "instead"
    assert tried == ["launch"]
    assert or_else("op", "another text", lambda: "launched", lambda: "instead") == "launched"


@pytest.mark.usefixtures("failures")
def test_what_no_way_computes_raises_what_the_launch_raised() -> None:
    with pytest.raises(RuntimeError, match="no memory on this side"):
        or_else("op", "a text", _raise(RuntimeError("no memory on this side")), _raise(ValueError("nor that")))
    assert not FAILURES.causes


@pytest.mark.usefixtures("failures")
def test_launches_that_are_noted_tell_of_their_faults() -> None:
    with noting(lambda *_: None), pytest.raises(RuntimeError, match="a stand-in"):
        or_else("op", "a text", _raise(RuntimeError("a stand-in")), lambda: "instead")
    assert not FAILURES.causes
