"""What a tensor itself says of what it was made from, and what graphs in a row know of each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.passes.graph import mutation
from attn_compiler.passes.recovering.reading.borders import GraphRow, Made, known_of, of_itself
from attn_compiler.torch_private import known_masks
from tests.spec.meanings import Inputs

B, S = 2, 6
(I0, I1, Q, K) = known_masks.indices(4)
VALUE = torch.empty(B, 1, S, S, dtype=torch.bool)
CAUSAL = ix.compare("<=", K, Q)
PADDING = ix.as_bool(Load("padding", (I0, K), "int"))
QUERIES = ix.as_bool(Load("padding", (I0, Q), "int"))
WINDOW = ix.compare("<", Q, ix.add(K, Const(3)))
NUMBERS = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1]])


def _values(x: Expr, itself: Tensor | None = None) -> list[object]:
    """Its value at every place. itself: what it loads its own elements from."""

    def load(name: str, at: tuple[int, ...]) -> object:
        tensor = NUMBERS if name == "padding" else itself
        assert tensor is not None
        return tensor[at].item()

    inputs = Inputs(seqlen_q=S, seqlen_kv=S, load=load, sizes={"n0": B, "n1": 1, "n2": S, "n3": S})
    renamed = x
    for index, name in zip((I0, I1, Q, K), "bhqk", strict=True):
        renamed = ix.substitute(renamed, index, Index(name))
    return [inputs.value(renamed, *at) for at in itertools.product(range(B), range(1), range(S), range(S))]


def _and(*conditions: Expr) -> Expr:
    return ix.apply("and", *conditions)


@pytest.mark.parametrize(
    "condition",
    [PADDING, _and(CAUSAL, PADDING), _and(CAUSAL, PADDING, WINDOW)],
    ids=["padding", "causal", "window, by the diagonal"],
)
def test_a_row_of_the_mask_itself_says_which_keys_are_padding(condition: Expr) -> None:
    own = of_itself(condition, ["padding"], VALUE)
    assert own is not None
    assert own.facts.tensors == {known_masks.ITSELF}
    mask = torch.tensor(_values(condition)).reshape(VALUE.shape)
    assert _values(own, mask) == mask.flatten().tolist()


@pytest.mark.parametrize(
    "condition",
    [_and(CAUSAL, QUERIES), _and(PADDING, ix.compare("<", Q, Const(3)))],
    ids=["of both", "no row sees every key"],
)
def test_what_no_row_says_is_unknown(condition: Expr) -> None:
    assert of_itself(condition, ["padding"], VALUE) is None
    assert known_of(condition, VALUE) is None


def test_a_window_says_nothing_where_no_diagonal_does() -> None:
    wide = torch.empty(B, 1, S, S + 1, dtype=torch.bool)
    assert of_itself(_and(WINDOW, PADDING), ["padding"], wide) is None
    assert of_itself(PADDING, ["padding"], wide) is not None
    assert known_of(_and(WINDOW, PADDING), wide) is None


def test_what_is_at_hand_stays_as_it_is() -> None:
    condition = _and(CAUSAL, PADDING)
    assert of_itself(condition, ["another"], VALUE) is condition


def test_numbers_are_compared_with_the_one_that_lets_through() -> None:
    added = ix.where(_and(CAUSAL, PADDING), Const(0.0), Const(-1e9))
    value = VALUE.float()
    own = of_itself(added, ["padding"], value)
    assert own is not None
    mask = torch.tensor(_values(added)).reshape(VALUE.shape)
    assert _values(own, mask) == mask.flatten().tolist()


@pytest.mark.parametrize(
    "x",
    [
        ix.where(PADDING, Const(0.0), Const(0.0)),
        ix.where(PADDING, Const(float("nan")), Const(1.0)),
        ix.where(PADDING, Load("padding", (I0, K), "float"), Const(1.0)),
        ix.mul(Load("padding", (I0, K), "int"), Const(2)),
    ],
    ids=["equal", "nan", "three numbers", "a product"],
)
def test_other_numbers_say_nothing(x: Expr) -> None:
    found = of_itself(x, ["padding"], VALUE.float())
    assert found is None or found is x


def test_a_row_alone_has_no_queries() -> None:
    row = ix.as_bool(Load("padding", (Index("i0"),), "int"))
    assert of_itself(row, ["padding"], torch.empty(S, dtype=torch.bool)) is None


def test_what_is_known_counts_by_the_tensor_s_own_sizes() -> None:
    known = known_of(_and(CAUSAL, PADDING), VALUE)
    assert known is not None
    assert known.dims == 4
    assert ix.sizes(known.element) <= {"n2"}
    assert known_of(ix.compare("<", K, ix.Size("s7")), VALUE) is None


def test_what_a_later_graph_wrote_to_is_forgotten() -> None:
    mask, padding, other = torch.ones(3), torch.ones(3), torch.ones(3)
    made = Made(example=mask, element=CAUSAL, loads={"padding": padding}, graph=1)
    for written, is_known in (([], True), ([other], True), ([mask], False), ([padding], False), ([mask[1:]], False)):
        row = GraphRow(written=[set(), set(), mutation.storages_of(written)], made=[made])
        assert (row.find(mask) is made) is is_known
        assert row.find(other) is None
        assert row.find(mask.view(3)) is None


def test_what_was_written_before_or_while_it_was_made_does_not_count() -> None:
    mask = torch.ones(3)
    row = GraphRow(
        written=[mutation.storages_of([mask])] * 2, made=[Made(example=mask, element=CAUSAL, loads={}, graph=1)]
    )
    assert row.find(mask) is not None
    assert row.is_written([mask])
    assert row.is_written([mask], since=1)
    assert not row.is_written([mask], since=2)


def _rectangle(x: Expr, keys: int) -> list[object]:
    """Its value at every place of a mask of S queries and more keys. Of itself: what it loads its own elements from."""
    numbers = torch.nn.functional.pad(NUMBERS, (0, keys - S))
    inputs = Inputs(
        seqlen_q=S,
        seqlen_kv=keys,
        load=lambda name, at: numbers[at].item(),
        sizes={"n0": B, "n1": 1, "n2": S, "n3": keys},
    )
    renamed = x
    for index, name in zip((I0, I1, Q, K), "bhqk", strict=True):
        renamed = ix.substitute(renamed, index, Index(name))
    return [inputs.value(renamed, *at) for at in itertools.product(range(B), range(1), range(S), range(keys))]


def test_with_more_keys_than_queries_the_last_row_still_says_which_keys_are_padding() -> None:
    """The prompt in a static cache: keys behind the diagonal of the last query are behind that of all queries."""
    keys = S + 4
    value = torch.empty(B, 1, S, keys, dtype=torch.bool)
    condition = _and(CAUSAL, PADDING)
    own = of_itself(condition, ["padding"], value)
    assert own is not None
    mask = torch.tensor(_rectangle(condition, keys)).reshape(value.shape)
    renamed = own
    for index, name in zip((I0, I1, Q, K), "bhqk", strict=True):
        renamed = ix.substitute(renamed, index, Index(name))
    inputs = Inputs(
        seqlen_q=S, seqlen_kv=keys, load=lambda name, at: mask[at].item(), sizes={"n0": B, "n1": 1, "n2": S, "n3": keys}
    )
    found = [inputs.value(renamed, *at) for at in itertools.product(range(B), range(1), range(S), range(keys))]
    assert found == mask.flatten().tolist()
    assert of_itself(_and(CAUSAL, ix.compare("<", Q, ix.add(K, Const(3))), PADDING), ["padding"], value) is None
    # What lets the last query see less than another one says too little there.
    assert of_itself(_and(ix.compare("<=", Q, K), PADDING), ["padding"], value) is None
