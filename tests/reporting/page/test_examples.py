"""What is made up for tensors that are known at run time only, and what is not drawn."""

from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load, Size
from attn_compiler.reporting.page.examples import Drawable, NotDrawn, drawable
from attn_compiler.spec import masks
from attn_compiler.spec.masks import Dense, MaskKind, MaskSpec

B, H, K, Q = map(Index, "bhkq")
DENSE = Dense(shape=(2, 1, 100, 100), dtype="bool")


def _allowed(drawn: Drawable, q: int, k: int) -> bool:
    def no_tensor(tensor: str, at: tuple[int, ...]) -> object:
        raise AssertionError(f"{tensor} is still read")

    return bool(ix.evaluate(drawn.condition, {**drawn.sizes, "b": 0, "h": 0, "q": q, "k": k}, no_tensor))


def _drawn(*kinds: MaskKind, seqlen_q: int = 100, seqlen_kv: int = 100) -> Drawable:
    return drawable(MaskSpec(kinds=kinds, dense=DENSE), seqlen_q, seqlen_kv)


def _keys(drawn: Drawable, q: int) -> list[int]:
    return [k for k in range(drawn.seqlen_kv) if _allowed(drawn, q, k)]


def test_what_positions_say_has_no_example() -> None:
    drawn = _drawn(masks.Causal())
    assert drawn.made_up == ()
    assert _keys(drawn, 5) == list(range(6))


@pytest.mark.parametrize(
    "condition",
    [
        ix.as_bool(Load("m", (B, K), "int")),
        ix.invert(Load("m", (B, K), "bool")),
        ix.compare("==", Load("m", (B, K), "int"), Const(1)),
        ix.compare("==", Load("m", (B, K), "int"), Const(0)),
        ix.compare(">", Load("m", (B, K), "float"), Const(0.5)),
    ],
    ids=ix.text,
)
def test_padding_is_in_the_first_keys_whichever_value_says_so(condition: ix.Expr) -> None:
    drawn = _drawn(masks.KeyPadding(condition=condition))
    assert _keys(drawn, 0) == list(range(30, 100))
    assert drawn.made_up == ("m leaves out the first 30 keys",)


def test_packed_documents_are_four() -> None:
    drawn = _drawn(masks.Causal(), masks.Document(of_key=Load("ids", (B, K), "int")))
    assert _keys(drawn, 29) == list(range(30))
    assert _keys(drawn, 31) == [30, 31]
    assert _keys(drawn, 99) == list(range(80, 100))
    assert drawn.made_up == ("ids tells four documents, which begin at 0, 30, 55, 80",)


def test_documents_in_a_condition_of_its_own_are_found_too() -> None:
    same = ix.compare("==", Load("ids", (B, K), "int"), Load("ids", (B, Q), "int"))
    other = masks.Formula(condition=ix.apply("or", same, ix.compare("==", K, Const(0))))
    assert _keys(_drawn(other), 31) == [0, *range(30, 55)]


def test_numbers_that_tensors_give() -> None:
    length = Load("lengths", (B,), "int")
    right = _drawn(masks.KeyBound(side="last", bound=ix.add(length, Const(-1))))
    assert (_keys(right, 0), right.made_up) == (list(range(75)), ("the length that lengths gives is 75",))
    assert _keys(_drawn(masks.KeyBound(side="first", bound=length)), 0) == list(range(20, 100))
    assert _keys(_drawn(masks.Prefix(length=length)), 2) == list(range(30))
    assert _keys(_drawn(masks.Chunked(size=10, start=length)), 12) == list(range(10, 20))


def test_a_cache_is_filled_for_the_most_part() -> None:
    decode = _drawn(masks.CausalFrom(offset=Load("cache_position", (ix.ZERO,), "int")), seqlen_q=1)
    assert _keys(decode, 0) == list(range(61))
    prompt = _drawn(masks.CausalFrom(offset=Load("cache_position", (ix.ZERO,), "int")), seqlen_q=10)
    assert _keys(prompt, 9) == list(range(100))
    each = _drawn(masks.Formula(condition=ix.compare("<=", K, Load("cache_position", (Q,), "int"))), seqlen_q=10)
    assert _keys(each, 0) == list(range(91))


def test_one_of_alternatives() -> None:
    ids = masks.Document(of_key=Load("ids", (B, K), "int"))
    drawn = _drawn(masks.AnyOf(alternatives=((masks.Causal(),), (ids,))))
    assert _keys(drawn, 40) == list(range(55))
    assert len(drawn.made_up) == 1


def test_symbolic_sizes_get_a_number_and_it_is_said() -> None:
    drawn = drawable(MaskSpec(kinds=(masks.Formula(condition=ix.compare("<", K, ix.add(Q, Size("s0")))),)), "s0", "s0")
    assert (drawn.seqlen_q, drawn.seqlen_kv, drawn.made_up) == (1024, 1024, ("the size s0 is 1024",))


def test_a_cache_whose_length_is_symbolic() -> None:
    drawn = _drawn(masks.KeyBound(side="last", bound=Size("s7")), seqlen_q=1)
    assert _keys(drawn, 0) == list(range(76))
    assert drawn.made_up == ("the size s7 is 75",)


def test_what_differs_by_batch_row_or_head_is_of_the_first_and_it_is_said() -> None:
    drawn = _drawn(masks.Formula(condition=ix.compare("<", K, ix.add(H, B))))
    assert drawn.made_up == ("the first batch row", "the first head")


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (MaskSpec(dense=DENSE, reason="x adds more than masking"), "not proved, .* x adds more than masking"),
        (MaskSpec(dense=DENSE), "what the mask tensor holds"),
        (MaskSpec(kinds=(masks.Formula(condition=ix.compare("<", ix.add(K, Size("s7")), Size("s8"))),)), "s7, s8"),
        (MaskSpec(kinds=(masks.Formula(condition=Load("pairs", (Q, K), "bool")),)), "pairs"),
        (
            MaskSpec(kinds=(masks.KeyPadding(condition=ix.compare("==", Load("t", (K,), "int"), Const(7))),)),
            "no example",
        ),
    ],
)
def test_what_nothing_can_be_made_up_for_is_not_drawn(mask: MaskSpec, why: str) -> None:
    with pytest.raises(NotDrawn, match=why):
        drawable(mask, 100, 100)


def test_a_tensor_that_adds_and_does_not_mask_leaves_no_pair_out() -> None:
    drawn = drawable(MaskSpec(dense=DENSE), 100, 100, is_added=True)
    assert _keys(drawn, 0) == list(range(100))
