"""The spec of an attention and of linear attention, as text."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.spec import added_scores, attention as spec, mask_kinds, masks, scores
from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec
from attn_compiler.spec.codec import UNSAID, Codec
from attn_compiler.spec.linear import LinearForm, LinearSpec
from tests.index_expr.expressions import expressions
from tests.lowerings.specs import make_spec

DIMS = st.integers(0, 4096) | st.sampled_from(["s0", "s1", "4*s0", "s0*s1 + 1", "u0"])
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def _tensors() -> st.SearchStrategy[TensorSpec]:
    four = st.tuples(DIMS, DIMS, DIMS, DIMS)
    return st.builds(TensorSpec, shape=four, strides=four, dtype=DTYPES, requires_grad=st.booleans())


def _kinds(kinds: tuple[type[Any], ...]) -> st.SearchStrategy[Any]:
    """Any instance of one of these classes, by the types of their fields."""
    return st.one_of(*(st.builds(kind, **_fields(kind)) for kind in kinds))


def _fields(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    return {f.name: _of_type(hints[f.name]) for f in dataclasses.fields(kind)}


def _has_no_nan(x: Expr) -> bool:
    # Equal to itself as a constant, but not in the JSON that the tests read back.
    return "nan" not in repr(x)


#: made once, since it takes long
_EXPRESSIONS = expressions(1).filter(_has_no_nan)


def _of_type(hint: Any) -> st.SearchStrategy[Any]:
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=8),
        bool: st.booleans(),
        int: st.integers(-(10**6), 10**6),
        float: FLOATS,
        int | None: st.none() | st.integers(0, 4096),
        Expr: _EXPRESSIONS,
        masks.Alignment: st.sampled_from(masks.Alignment),
        tuple[int | str, ...]: st.lists(DIMS, max_size=4).map(tuple),
        tuple[Expr, ...]: st.lists(_EXPRESSIONS, max_size=2).map(tuple),
        added_scores.LogBuckets | None: st.none() | st.builds(added_scores.LogBuckets),
    }
    if hint in known:
        return known[hint]
    # Alternatives of conjunctions of kinds: one level of them is enough.
    simple = tuple(k for k in masks.KINDS if k is not masks.AnyOf)
    return st.lists(st.lists(_kinds(simple), max_size=2).map(tuple), max_size=2).map(tuple)


SCORES = (*added_scores.PROVED_KINDS, *added_scores.PARTS)
SPECS = st.builds(
    AttentionSpec,
    q=_tensors(),
    k=_tensors(),
    v=_tensors(),
    mask=st.builds(
        masks.MaskSpec,
        kinds=st.lists(_kinds(masks.KINDS), max_size=2).map(tuple),
        flag=st.none() | st.sampled_from(masks.Flag),
        dense=st.none() | _kinds((masks.Dense,)),
        reason=st.none() | st.text(max_size=8),
    ),
    score=st.builds(
        scores.ScoreSpec,
        scale=FLOATS,
        runtime_scale=st.booleans(),
        changes=st.lists(_kinds(scores.KINDS), max_size=2).map(tuple),
        dropout_p=st.floats(0, 1),
        proved=st.lists(_kinds(added_scores.PROVED_KINDS), max_size=2).map(tuple),
        softmax_dtype=DTYPES,
    ),
    device=st.sampled_from(["cpu", "cuda"]),
    out_dtype=DTYPES,
    needs_grad=st.booleans(),
    returns_weights=st.booleans(),
    lse=st.sampled_from(["unread", "read", "differentiated", "merged"]),
)


@settings(max_examples=200, deadline=None)
@given(SPECS)
def test_text_and_back(original: AttentionSpec) -> None:
    back = AttentionSpec.from_text(original.to_text())
    assert back == original
    assert hash(back) == hash(original)
    assert back.to_text() == original.to_text()


@settings(max_examples=100, deadline=None)
@given(SPECS, SPECS)
def test_different_specs_have_different_texts(a: AttentionSpec, b: AttentionSpec) -> None:
    assert (a == b) == (a.to_text() == b.to_text())


def _tensor(*shape: Dim) -> TensorSpec:
    return TensorSpec(shape=shape, strides=(1,) * len(shape), dtype="bfloat16")


def _spec() -> AttentionSpec:
    return AttentionSpec(
        q=_tensor(2, 8, 5, 64),
        k=_tensor(2, 4, "s0", 64),
        v=_tensor(2, 4, "s0", 32),
        mask=masks.MaskSpec(),
        score=scores.ScoreSpec(scale=0.125),
        device="cpu",
        out_dtype="float32",
    )


def test_the_text_of_a_spec_whose_lse_is_unread_does_not_name_it() -> None:
    found = _spec()
    assert '"lse"' not in found.to_text()
    read = dataclasses.replace(found, lse="read")
    assert '"lse":"read"' in read.to_text()
    assert AttentionSpec.from_text(read.to_text()) == read


def test_the_text_of_a_spec_names_ranges_only_where_there_are_some() -> None:
    found = _spec()
    assert '"ranges"' not in found.to_text()
    held = dataclasses.replace(found, ranges=(spec.SizeRange(size="s0", least=2, most=512),))
    assert AttentionSpec.from_text(held.to_text()) == held


def test_names_of_the_axes() -> None:
    found = _spec()
    assert (found.batch, found.num_heads_q, found.num_heads_kv) == (2, 8, 4)
    assert (found.seqlen_q, found.seqlen_kv, found.head_dim_qk, found.head_dim_v) == (5, "s0", 64, 32)
    assert found.dtype == "bfloat16"
    assert found.is_gqa


def test_text_is_json_that_people_can_read() -> None:
    parsed = json.loads(_spec().to_text())
    assert parsed["kind"] == "AttentionSpec"
    assert parsed["k"]["shape"] == [2, 4, "s0", 64]


def test_text_is_parsed_once() -> None:
    text = _spec().to_text()
    assert AttentionSpec.from_text(text) is AttentionSpec.from_text(text)


def test_text_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="text of AttentionSpec, got that of MaskSpec"):
        AttentionSpec.from_text(AttentionSpec.codec.text(masks.MaskSpec()))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AttentionSpec)])
def test_a_spec_is_frozen(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(_spec(), field, None)


def test_every_kind_can_be_written_and_read() -> None:
    """A kind that is not listed would be written, and fail when the text is read in the backward."""
    listed = {cls.__name__ for cls in (*masks.KINDS, masks.Dense, *scores.KINDS, *SCORES)}
    defined = {
        name
        for module in (mask_kinds, masks, scores, added_scores)
        for name, value in vars(module).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    }
    assert defined - {"MaskSpec", "ScoreSpec", "Inputs"} == listed


def test_numbers_that_mask_are_known_of_a_mask_that_was_read_in_part() -> None:
    dense = masks.Dense(shape=(2, 1, 128, 128), dtype="float32")
    unread = make_spec(mask=masks.MaskSpec(dense=dense, reason="not read"))
    assert unread.adds_unread
    part = dataclasses.replace(unread, mask=dataclasses.replace(unread.mask, kinds=(masks.Causal(),)))
    assert not part.adds_unread
    called = dataclasses.replace(part, mask=dataclasses.replace(part.mask, flag=masks.Flag.CALLED))
    assert called.adds_unread
    truth = dataclasses.replace(unread.mask, dense=dataclasses.replace(dense, dtype="bool"))
    assert not dataclasses.replace(unread, mask=truth).adds_unread


# Frozen data as text and back.
class Side(enum.Enum):
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    weight: float | None = 1.0
    flag: bool = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    others: tuple[Inner, ...] = ()
    side: Side = Side.LEFT
    where: ix.Expr = ix.TRUE


CLASSES = (Outer, Inner, Side)
WHERE = ix.compare("<=", ix.Index("k"), ix.add(ix.Index("q"), ix.Const(3)))
VALUES = [
    Outer(inner=Inner(size=1)),
    Outer(inner=Inner(size=2, weight=None), others=(Inner(size=3, weight=0.0), Inner(size=4, flag=True)), where=WHERE),
]


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_any_value_as_text_and_back(value: Outer, brief: bool) -> None:
    codec = Codec(CLASSES, brief=brief)
    assert codec.value(codec.text(value), Outer) == value
    assert codec.value(codec.text(value), Outer) is codec.value(codec.text(value), Outer)


def test_a_brief_text_says_what_is_not_usual() -> None:
    codec = Codec(CLASSES, brief=True)
    assert codec.text(Inner(size=1)) == '{"kind":"Inner","size":1}'
    assert codec.text(Inner(size=1, weight=None)) == '{"kind":"Inner","size":1,"weight":null}'
    # Equal in Python, and another text.
    assert codec.text(Inner(size=1, flag=0)) != codec.text(Inner(size=1))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Grown:
    size: int
    later: str = field(default="usual", metadata=UNSAID)


def test_a_field_that_came_later_is_said_where_it_is_not_usual() -> None:
    codec = Codec((Grown,))
    assert codec.text(Grown(size=1)) == '{"kind":"Grown","size":1}'
    assert codec.text(Grown(size=1, later="not")) == '{"kind":"Grown","later":"not","size":1}'
    assert all(codec.value(codec.text(x), Grown) == x for x in (Grown(size=1), Grown(size=1, later="not")))


def test_a_full_text_says_everything() -> None:
    said = json.loads(Codec(CLASSES).text(VALUES[0]))
    assert said["inner"] == {"kind": "Inner", "size": 1, "weight": 1.0, "flag": False}
    assert said["side"] == {"kind": "Side", "value": "left"}


def test_further_classes() -> None:
    with pytest.raises(ValueError, match="unknown kind, 'Inner'; known are Side"):
        Codec((Side,)).value('{"kind":"Inner","size":1}', Inner)
    assert Codec((Side,)).extended(Inner).value('{"kind":"Inner","size":1}', Inner) == Inner(size=1)


def test_a_text_of_another_class_is_refused() -> None:
    codec = Codec(CLASSES)
    with pytest.raises(TypeError, match="the text of Outer, got that of Inner"):
        codec.value(codec.text(Inner(size=1)), Outer)


def test_two_classes_of_one_name_are_refused() -> None:
    other = dataclass(frozen=True)(type("Inner", (), {}))
    with pytest.raises(ValueError, match="one name"):
        Codec((Inner, other))


# The form of a recurrence as text, and words for people.
FORM = LinearForm(
    function="models.next:chunk#1", recurrence="delta", roles=("q", "k", "v", "g", "beta"), chunk=64, eps=1e-6
)
STATE_SPACE = LinearForm(
    function="models.bamba:scan#2",
    recurrence="ssd",
    roles=("x", "dt", "A", "B", "C", "D", "state"),
    chunk=256,
    softplus=True,
    limits=(0.0, float("inf")),
    state_dtype="float64",
)


def test_a_text_is_read_back_as_it_was() -> None:
    for form in (FORM, STATE_SPACE):
        assert LinearForm.from_text(form.text) == form
    assert FORM.text != dataclasses.replace(FORM, eps=None).text


def test_a_state_is_told_by_its_role() -> None:
    assert (FORM.has_state, STATE_SPACE.has_state) == (False, True)


def test_words_say_the_recurrence_its_heads_and_its_decay() -> None:
    spec = LinearSpec(
        form=FORM,
        batch=2,
        length="s0",
        num_heads_k=4,
        num_heads_v=4,
        head_dim_k=16,
        head_dim_v=16,
        dtype="float32",
        device="cpu",
    )
    assert spec.words == "gated delta rule, 4 heads of 16/16, decay a head"
    grouped = dataclasses.replace(spec, num_heads_k=2, form=dataclasses.replace(FORM, channel=True))
    assert grouped.words == "gated delta rule, 4 heads of 16/16, 2 of q and k, decay a channel"
    of_ssd = dataclasses.replace(spec, form=STATE_SPACE, num_heads_k=1, num_heads_v=1)
    assert of_ssd.words == "state space (Mamba-2), 1 head of 16/16, decay a head, with a state"
