"""The arguments are the schemas', and a body and a place in compiled code replay what was kept; lists of a mask are made by kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls import leaf_calls, listing_launch
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
from attn_compiler.lowerings.shared.launching.dry_run import noting
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.launching.on_device import Empty
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Start
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.ops.listing import OF_KEYS, OF_QUERIES, OPEN, ListAsked
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.reasons.errors import AttnCompilerWarning
from tests.lowerings.shared.listed_masks import arguments, asked
from tests.lowerings.shared.searched_tiles import Mask, tensors


# The arguments are the schemas', and a body and a place in compiled code replay what was kept.
@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        self.firsts.append(given.text)
        same.device, same.empties = torch.device("cpu", 0), {"made": Empty.like(given.q)}
        same.keep([Doubles()], inputs=("q", "k", "v", "mask"), returned=("made", None))
        return given.q * 2, torch.zeros(given.q.shape[:3])

    def definition(self, given: ForwardArguments) -> Attention:
        return Attention(q=given.q, k=given.k, v=given.v, tensors={}, scale=1.0)


class Backward(BackwardBody):
    def first(self, given: BackwardArguments, same: CallCache) -> Gradients:
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
    monkeypatch.setattr(leaf_calls, "call_cache", None)
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


def _raise(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.usefixtures("planted_failures")
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


def test_a_test_of_a_kernel_that_fails_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parents[2] / "conftest.py").read_text(encoding="utf-8"))
    fails = (
        f"from {FAILURES.__module__} import FAILURES\ndef test_it({{}}): FAILURES.fail('a text', 'no such kernel')\n"
    )
    pytester.makepyfile(test_unseen=fails.format(""), test_planted=fails.format("planted_failures"))
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2, errors=1)
    assert not FAILURES.causes


@pytest.mark.usefixtures("planted_failures")
def test_what_no_way_computes_raises_what_the_launch_raised() -> None:
    with pytest.raises(RuntimeError, match="no memory on this side"):
        or_else("op", "a text", _raise(RuntimeError("no memory on this side")), _raise(ValueError("nor that")))
    assert not FAILURES.causes


@pytest.mark.usefixtures("planted_failures")
def test_launches_that_are_noted_tell_of_their_faults() -> None:
    with noting(lambda *_: None), pytest.raises(RuntimeError, match="a stand-in"):
        or_else("op", "a text", _raise(RuntimeError("a stand-in")), lambda: "instead")
    assert not FAILURES.causes


# Which kernels make the lists of a mask, and what they are told.
def _launched(monkeypatch: pytest.MonkeyPatch, one: ListAsked) -> dict[str, tuple[Arguments, dict[str, Any]]]:
    """What each kernel would be launched with; none runs."""
    found: dict[str, tuple[Arguments, dict[str, Any]]] = {}

    def record(kernel: Any, same: Any, have: dict[str, Any], made: Callable[[], Arguments]) -> None:
        found[kernel.fn.__name__] = made(), have

    monkeypatch.setattr(listing_launch, "launch", record)
    listing_launch.lists(*arguments(one))
    return found


def _asked(names: tuple[str, ...], *, by_key: bool = False, band: Band | None = None) -> ListAsked:
    mask = Mask(seqlen_q=70, seqlen_kv=150, band=band, have=tensors(70, 150, names))
    return asked(mask, (64, 32), by_key=by_key)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("keys",), ["tile_bounds", "tile_lists", "tile_order"]),
        (("rows", "documents_q", "documents_k"), ["tile_bounds", "tile_lists", "tile_order"]),
        # What 32 x 32 pairs hold needs no sums.
        (("mask",), ["tile_lists", "tile_order"]),
    ],
)
def test_only_what_has_work_is_launched(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], expected: list[str]
) -> None:
    one = _asked(names)
    assert list(_launched(monkeypatch, one)) == expected
    assert list(_launched(monkeypatch, dataclasses.replace(one, ordered=False))) == expected[:-1]


def test_what_a_mask_does_not_have_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _launched(monkeypatch, _asked(("keys",)))
    bounds, have = found["tile_bounds"]
    assert bounds.tensors == {
        "Rows": None, "Keys": "keys", "DocumentsQ": None, "DocumentsK": None, "OfQueries": "of_queries", "OfKeys": "of_keys"
    }  # fmt: skip
    assert (bounds.numbers["rows_side"], bounds.numbers["documents_qb"]) == (0, 0)
    lists, _ = found["tile_lists"]
    assert lists.tensors["Units"] is None
    assert [lists.numbers[f"HAS_{part}"] for part in ("ROWS", "KEYS", "DOCUMENTS")] == [False, True, False]
    assert (have["of_queries"].shape[1:], have["of_keys"].shape[1:]) == ((OF_QUERIES, 2), (OF_KEYS, 5))


@pytest.mark.parametrize(("by_key", "lists"), [(False, 2), (True, 5)])
def test_there_is_a_program_for_each_block_and_for_each_list(
    monkeypatch: pytest.MonkeyPatch, by_key: bool, lists: int
) -> None:
    found = _launched(monkeypatch, _asked(("keys", "mask"), by_key=by_key))
    batch, heads = found["tile_lists"][1]["lists"].shape[:2]
    assert found["tile_bounds"][0].grid == (2 + 5, batch, 1)
    assert found["tile_lists"][0].grid == (lists, heads, batch)
    assert found["tile_order"][0].grid == (1, batch * heads, 1)


def test_an_axis_of_one_element_has_no_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _asked(("keys",))
    assert one.keys is not None
    shared = dataclasses.replace(one, keys=one.keys[:1])
    assert _launched(monkeypatch, one)["tile_bounds"][0].numbers["keys_b"] == 150
    assert _launched(monkeypatch, shared)["tile_bounds"][0].numbers["keys_b"] == 0


def test_an_open_side_reaches_beyond_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = _launched(monkeypatch, _asked(("keys",), band=Band(right=3)))["tile_lists"][0].numbers
    assert (numbers["band_left"], numbers["band_right"]) == (OPEN, 3)
    numbers = _launched(monkeypatch, _asked(("keys",), band=Band(left=9, right=0, from_end=True)))["tile_lists"][
        0
    ].numbers
    assert (numbers["band_left"], numbers["band_right"]) == (9 - 80, 80)


@pytest.mark.parametrize(("tile", "blocks"), [((32, 32), 128), ((128, 64), 128), ((256, 256), 32), ((2048, 2048), 1)])
def test_a_program_reads_fewer_blocks_that_have_many_units(tile: tuple[int, int], blocks: int) -> None:
    one = dataclasses.replace(_asked(("mask",)), queries=tile[0], keys_of=tile[1])
    assert listing_launch._block(one) == blocks
    assert listing_launch._block(dataclasses.replace(one, units=None, keys=torch.ones(1, 150).bool())) == 128
