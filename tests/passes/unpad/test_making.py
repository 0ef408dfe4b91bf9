"""Packing is made, and sizes are asked for."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph.axes import Atom, fresh, shape_exprs, size_expr
from attn_compiler.passes.unpad import indexing, making, packed_sizes
from attn_compiler.passes.unpad.forms import Indexed, KeepsPadding, Kind, Value
from attn_compiler.passes.unpad.making import Maker, Tokens
from attn_compiler.passes.unpad.masks import PackedPairs, PositionBand
from attn_compiler.passes.unpad.unpadding import Batch
from attn_compiler.reasons.codes import Code
from tests.passes.unpad.encoder import MASK, Encoder, check, compiled, mask_of

# What the packed graph is made of.
REAL = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]]).bool()
ROWS, LENGTH = REAL.shape
TOKENS = int(REAL.sum())
#: with padding that fills up the last step
FILLED = TOKENS + 3
BATCH = Batch.from_mask(REAL).first(FILLED)


class Making:
    """A packed graph of one input x and the tokens; `run` gives what its nodes are for real numbers."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.mode, graph = x, FakeTensorMode(), fx.Graph()
        values = dict(zip(Batch.__dataclass_fields__, BATCH.inputs, strict=False))
        nodes = {name: self._given(graph, name, value) for name, value in {"x": x, "number": FILLED, **values}.items()}
        source = self._given(fx.Graph(), "x", x)
        mirror: Any = SimpleNamespace(graph=fx.Graph())
        self.batch, self.seq = Atom(size_expr(ROWS)), Atom(size_expr(LENGTH))
        sizes = (self.batch.size, self.seq.size)
        analysis: Any = SimpleNamespace(
            mirror=mirror, batch=self.batch, seq=self.seq, sizes=sizes, value=lambda node: self.value
        )
        self.given = nodes.pop("x")
        self.maker = Maker(
            analysis=analysis, graph=graph, copies={source: self.given}, mode=self.mode, given=Tokens(**nodes)
        )

    def _given(self, graph: fx.Graph, name: str, value: Tensor | int) -> fx.Node:
        node = graph.placeholder(name)
        is_size = isinstance(value, int)
        node.meta["example_value"] = value if is_size else self.mode.from_tensor(value, static_shapes=True)
        return node

    def run(self, out: Any) -> Any:
        self.maker.graph.output(out)
        self.maker.graph.lint()
        return fx.GraphModule(nn.Module(), self.maker.graph)(self.x, FILLED, *BATCH.inputs)

    def indexed(self, form: Indexed) -> Tensor:
        recipe = indexing.indexed(self.given, form)
        found: Tensor = self.run(recipe.make(self.maker, (self.given,)))
        return found

    def unpacked(self, batch: int, seq: int, rank: int, number: float) -> Tensor:
        """The way back of a value whose rows and positions are at these axes. number: at padding."""
        dims = list(fresh(shape_exprs(torch.empty([7] * rank))))
        dims[batch], dims[seq] = (self.batch,), (self.seq,)
        if batch == seq:
            dims[batch] = (self.batch, self.seq)
        recipe = indexing.unpacked(self.maker.analysis, self.given, tuple(dims), number)
        found: Tensor = self.run(recipe.make(self.maker, (self.given,)))
        return found


@pytest.mark.parametrize(
    "band",
    [
        PositionBand(),
        PositionBand(causal=True),
        PositionBand(left=1),
        PositionBand(left=1, right=2),
        PositionBand(causal=True, left=2),
    ],
    ids=str,
)
def test_tokens_see_tokens_of_their_row_as_far_as_the_band_lets_them(band: PositionBand) -> None:
    made = Making(torch.empty(1))
    pairs = PackedPairs(band=band, scores=None)
    first = made.maker.mask(pairs, {}, made.given)
    assert made.maker.mask(dataclasses.replace(pairs), {}, made.given) is first
    mask = made.run(first)
    assert (mask.shape, mask.dtype) == ((1, 1, FILLED, FILLED), torch.bool)
    # What fills up the last step sees nothing, and nothing sees it.
    assert not mask[0, 0, TOKENS:].any()
    assert not mask[..., TOKENS:].any()
    # Positions are counted among the real tokens of a row: distances are those of tokens that lie side by side.
    rows = BATCH.rows.tolist()
    for q, k in itertools.product(range(TOKENS), repeat=2):
        is_after = not band.causal or k <= q
        is_near = (band.left is None or q - k <= band.left) and (band.right is None or k - q <= band.right)
        assert bool(mask[0, 0, q, k]) is (rows[q] == rows[k] and is_after and is_near)


def test_rows_begin_and_end_among_the_tokens() -> None:
    made = Making(torch.empty(1))
    starts, ends = made.run((made.maker.row_starts(), made.maker.row_ends()))
    counts = REAL.sum(1)
    assert torch.equal(ends - starts + 1, counts)
    for row in (row for row in range(ROWS) if counts[row]):
        assert BATCH.rows[starts[row]] == BATCH.rows[ends[row]] == row


@pytest.mark.parametrize(
    ("shape", "batch", "seq", "rank"),
    [
        ((ROWS, LENGTH, 2), 0, 1, 3),
        ((LENGTH, ROWS, 2), 1, 0, 3),
        ((2, ROWS, 3, LENGTH), 1, 3, 4),
        ((1, LENGTH, 2), 0, 1, 3),
        ((LENGTH, 2), 0, 1, 3),
        ((ROWS, 1, 2), 0, 1, 3),
        ((1, 1, 2), 0, 1, 3),
        ((ROWS * LENGTH, 2), 0, 0, 2),
        ((1, 2), 0, 0, 2),
    ],
    ids=str,
)
def test_elements_are_taken_at_real_tokens(shape: tuple[int, ...], batch: int, seq: int, rank: int) -> None:
    x = torch.randn(shape)
    found = Making(x).indexed(Indexed(batch=batch, seq=seq, rank=rank))
    wide = x.reshape((1,) * (rank - x.dim()) + x.shape)
    if batch == seq:
        expected = wide[REAL.flatten()] if shape[0] > 1 else wide
    else:
        sizes = list(wide.shape)
        sizes[batch], sizes[seq] = ROWS, LENGTH
        moved = wide.expand(sizes).movedim((batch, seq), (0, 1))[REAL]
        expected = moved[None].movedim((0, 1), (batch, seq))
    for axis in {batch, seq}:
        if found.shape[axis] > 1:
            found = found.narrow(axis, 0, TOKENS)
    torch.testing.assert_close(found.expand(expected.shape), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "seq", "rank"), [(0, 1, 3), (1, 0, 3), (0, 2, 3), (2, 1, 4), (0, 0, 2), (1, 1, 3)])
@pytest.mark.parametrize("number", [0, -1.5])
def test_the_way_back_is_a_number_at_padding(batch: int, seq: int, rank: int, number: float) -> None:
    sizes = [7] * rank
    sizes[batch], sizes[seq] = 1, FILLED
    whole = torch.randn(sizes)
    whole.narrow(seq, TOKENS, FILLED - TOKENS).fill_(torch.nan)
    found, x = Making(whole).unpacked(batch, seq, rank, number), whole.narrow(seq, 0, TOKENS)
    sizes[seq] = TOKENS
    if batch == seq:
        expected = torch.full((ROWS * LENGTH, *(n for i, n in enumerate(sizes) if i != batch)), float(number))
        expected[REAL.flatten()] = x.movedim(batch, 0)
        assert torch.equal(found, expected.movedim(0, batch))
        return
    moved = x.movedim((batch, seq), (0, 1))[0]
    expected = torch.full((ROWS, LENGTH, *moved.shape[1:]), float(number))
    expected[REAL] = moved
    assert torch.equal(found, expected.movedim((0, 1), (batch, seq)))


def test_sizes_of_the_packed_form() -> None:
    made = Making(torch.empty(1))
    four = (Atom(size_expr(4)),)
    one, tokens, times, other = made.maker.sizes(((made.batch,), (made.seq,), (made.batch, made.seq, *four), four))
    assert (one, other) == (1, 4)
    assert made.run((tokens, times)) == (FILLED, 4 * FILLED)


def test_what_can_not_be_had_keeps_padding_in() -> None:
    made = Making(torch.empty(1))
    for value in (Value(kind=Kind.LOST, lost=KeepsPadding("code", "rule", "observed")), Value(kind=Kind.ORIGINAL)):  # type: ignore[arg-type]
        made.value = value
        with pytest.raises(KeepsPadding):
            made.maker.make([making.Need(made.given, "packed")])


# A model that asks a packed value for its sizes gets those of the batch as it has it.
ASKED_SIZES_ROWS, POSITIONS = "rows", "positions"


def _sizes(*numbers: int) -> list[torch.SymInt]:
    """Symbols, as dynamic sizes are."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(numbers))
    return list(mode.from_tensor(torch.empty(numbers), symbolic_context=context).shape)  # type: ignore[arg-type]


class Asked:
    """A graph that asks a packed value x for sizes, and its copy that the numbers are put into."""

    def __init__(self, write: Callable[[fx.Graph, fx.Node, list[torch.SymInt]], Any]) -> None:
        self.graph, self.rewritten = fx.Graph(), fx.Graph()
        sizes = _sizes(3, 10, 5)
        x = self.graph.placeholder("x")
        self.graph.output(write(self.graph, x, sizes))
        copies: dict[fx.Node, fx.Node] = {}
        self.rewritten.output(self.rewritten.graph_copy(self.graph, copies))
        self.maker: Any = SimpleNamespace(
            graph=self.rewritten,
            copies=copies,
            kind_of=lambda node: Kind.PACKED if node is x else None,
            analysis=SimpleNamespace(sizes=tuple(map(size_expr, sizes[:2]))),
            whole_size=lambda axis: (ASKED_SIZES_ROWS, POSITIONS)[axis],
            drop=lambda node: None,
        )

    def given(self) -> Any:
        packed_sizes.insert_sizes(self.graph, self.maker)
        (output,) = self.rewritten.find_nodes(op="output")
        return output.args[0]


def _asked(name: str, argument: int | str, value: Callable[[list[torch.SymInt]], Any]) -> Callable[..., fx.Node]:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> fx.Node:
        node = graph.call_method(name, (x, argument))
        node.meta["example_value"] = value(sizes)
        return graph.call_function(operator.mul, (node, 2))

    return write


@pytest.mark.parametrize(("axis", "name"), [(0, ASKED_SIZES_ROWS), (1, POSITIONS)])
def test_a_size_is_that_of_the_batch(axis: int, name: str) -> None:
    assert Asked(_asked("size", axis, lambda sizes: sizes[axis])).given().args == (name, 2)


def test_what_is_no_size_of_the_mask_keeps_padding_in() -> None:
    for asked, observed in (
        (_asked("size", 2, lambda sizes: sizes[2]), "s"),
        (_asked("getattr", "device", lambda _: torch.device("cpu")), "getattr"),
    ):
        with pytest.raises(KeepsPadding) as caught:
            Asked(asked).given()
        assert caught.value.reason.code is Code.PADDING_SIZES
        assert observed in caught.value.reason.observed


def test_all_sizes_are_taken_apart() -> None:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> Any:
        node = graph.call_method("size", (x,))
        node.meta["example_value"] = (sizes[0], sizes[1], 16)
        first, last = (graph.call_function(operator.getitem, (node, i)) for i in (1, -1))
        return graph.call_function(operator.add, (first, last)), node

    added, whole = Asked(write).given()
    assert added.args == (POSITIONS, 16)
    assert whole == (ASKED_SIZES_ROWS, POSITIONS, 16)


def test_what_is_asked_of_other_values_stays() -> None:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> Any:
        node = graph.call_method("size", (graph.placeholder("other"), 0))
        node.meta["example_value"] = sizes[0]
        return node

    assert Asked(write).given().target == "size"


def test_a_model_that_divides_by_its_length() -> None:
    model = Encoder(ending=lambda x, mask: x / x.shape[1] + x.shape[0])
    function = compiled(model, dynamic=True)
    for mask in (MASK, mask_of(2, 12, length=12)):
        assert check(model, mask, function).kept is None
