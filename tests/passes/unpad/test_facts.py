"""Facts of padding: forms, values, what is judged and drawn, and where packed operands go out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx

import attn_compiler
from attn_compiler.passes.graph.axes import Atom, Dims
from attn_compiler.passes.matching import match
from attn_compiler.passes.unpad import facts, forms, packing
from attn_compiler.passes.unpad.forms import FormRecipe, Indexed, KeepsPadding, Kind, Value, places
from attn_compiler.passes.writing import lower
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from tests.passes.unpad import encoder


# What is asked before each call is asked of the values that the model itself goes by.
def test_labels_that_are_written_in_place() -> None:
    def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = labels.clone()
        own.masked_fill_(own == -100, 3)
        return F.cross_entropy(x.view(-1, encoder.WIDTH), own.view(-1))

    labels = (encoder.ids_of(encoder.MASK) % encoder.WIDTH).masked_fill(encoder.MASK == 0, -100)
    kept = encoder.check(encoder.Encoder(ending=loss), labels=labels).kept
    assert kept is not None
    assert "in place" in kept.rule


def test_what_is_asked_takes_what_it_reads() -> None:
    """A model has hundreds of parameters."""

    def asked(weight: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> tuple[object, ...]:
        real = torch.ne(mask, 0)
        return real, (torch.all(real), torch.any(real)), None, None

    module, read = facts.with_places(fx.symbolic_trace(asked))
    assert read == (1,)
    told, packed, tokens, _, _, _, _, starts = module(encoder.MASK)
    assert told.dtype == torch.int64
    assert packed.tolist() == encoder.MASK.bool().tolist()
    assert told.tolist() == [21, 0, 1]
    assert starts.tolist() == [0, 4, 14, 21]
    assert tokens[:5].tolist() == [0, 1, 2, 3, 10]
    later, _ = facts.with_places(fx.symbolic_trace(asked), are_later=True)
    assert [x if x is None else x.tolist() for x in later(encoder.MASK)] == [told.tolist(), packed.tolist(), None]


# In which form an operand meets packed ones, and how an op is called on forms.
aten = torch.ops.aten


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


ROWS, POSITIONS, FORMS_WIDTH = _atom(3), _atom(10), _atom(4)
B, S, D = (ROWS,), (POSITIONS,), (FORMS_WIDTH,)


class Known:
    """A context of values that a test names."""

    batch, seq = ROWS, POSITIONS

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Value] = {}

    def value(self, node: fx.Node) -> Value:
        return self.values[node]

    def given(self, dims: Dims, *, packed: bool = False, kind: Kind = Kind.ORIGINAL) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty([int(torch.Size([int(a.size) for a in dim]).numel()) for dim in dims])
        recipe = FormRecipe(needs=(), make=lambda maker, given: node) if packed else None
        self.values[node] = Value(kind=Kind.PACKED if packed else kind, dims=dims, packed=recipe)
        return node

    def form(self, x: fx.Node, dims: Dims) -> Any:
        return forms.operand_form(self, self.graph.call_function(aten.add.Tensor, (x, x)), x, dims)


def test_rows_positions_and_sizes_are_told_apart() -> None:
    known = Known()
    assert forms.tags(known, (ROWS, POSITIONS, FORMS_WIDTH)) == ("rows", "positions", 4)
    # As many elements as positions are no positions, and an axis of one element is none.
    assert forms.tags(known, (_atom(10), _atom(1))) == (10,)
    assert forms.is_tagged(known, S)
    assert not forms.is_tagged(known, (_atom(10),))


@pytest.mark.parametrize(
    ("dims", "both"),
    [((B, S, D), True), (((ROWS, POSITIONS), D), True), ((B, D), False), ((S, S, B), False), ((), False)],
)
def test_both_are_held_once(dims: Dims, both: bool) -> None:
    assert forms.has_both(Known(), dims) is both


def test_packed_operands_in_one_order_stay_packed() -> None:
    known = Known()
    assert known.form(known.given((B, S, D), packed=True), (B, S, D)) == "packed"
    assert known.form(known.given((B, S), packed=True), ((_atom(2),), B, S)) == "packed"
    with pytest.raises(KeepsPadding) as caught:
        known.form(known.given((S, B), packed=True), (B, S))
    assert "in another order" in caught.value.reason.observed


def test_what_the_model_makes_itself_is_taken_at_the_result_s_tokens() -> None:
    known = Known()
    assert known.form(known.given((B, S, D)), (B, S, D)) == Indexed(batch=0, seq=1, rank=3)
    assert known.form(known.given((S, D)), (B, S, D)) == Indexed(batch=0, seq=1, rank=3)
    assert known.form(known.given((D,)), (B, S, D)) == "plain"
    number = known.graph.placeholder("n")
    number.meta["val"], known.values[number] = 3, Value(kind=Kind.ORIGINAL)
    assert known.form(number, (B, S, D)) == "plain"


def test_what_is_lost_or_shares_an_axis_is_refused() -> None:
    known = Known()
    with pytest.raises(KeepsPadding, match="op between") as caught:
        known.form(known.given((B, S, D), kind=Kind.LOST), (B, S, D))
    assert "can't be packed" in caught.value.reason.observed
    for dims, said in (
        (((ROWS, FORMS_WIDTH), S), "share an axis"),
        (((POSITIONS, ROWS),), "positions come before rows"),
    ):
        with pytest.raises(KeepsPadding) as caught:
            known.form(known.given(dims), dims)
        assert said in caught.value.reason.observed
        assert "aten.add.Tensor" in caught.value.reason.observed


def _recorded(recipe: FormRecipe, *given: Any) -> tuple[Any, ...]:
    maker = SimpleNamespace(call=lambda target, *args, **kwargs: (target, args, kwargs), name="maker")
    made: Any = recipe.make(maker, given)  # type: ignore[arg-type]
    return tuple(made)


def test_an_op_is_called_on_its_operands_forms() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(aten.add.Tensor, (x, y), {"alpha": 2})
    recipe = forms.call(node, {x: "packed"})
    assert [tuple(need) for need in recipe.needs] == [(x, "packed"), (y, "plain")]
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert _recorded(recipe, a, b) == (aten.add.Tensor, (a, b), {"alpha": 2})


# A packed graph stays with kernels for all of its attentions.
def test_without_a_kernel_that_leaves_rows_out_padding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAVING_OUT", ())
    found = encoder.check(encoder.Encoder())
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
    model = encoder.Encoder()
    with pytest.warns(AttnCompilerWarning, match="pass 'unpad' failed at the graph: KeyError: 'not packed'"):
        found = encoder.check(model, function=encoder.compiled(model, strict=False))
    assert found.kept is not None
    assert found.kept.code is Code.FAULT
    (told,) = [one for one in attn_compiler.reports() if one.unpad is not None]
    assert told.num_sites == len(model.layers)
    assert told.failure is None


def test_a_graph_that_fails_after_it_was_packed_runs_as_the_model_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("too late")

    monkeypatch.setattr(lower, "verify_graph", fail)
    model = encoder.Encoder()
    run = encoder.compiled(model, strict=False)
    with pytest.warns(AttnCompilerWarning, match="pass 'verify' failed at layers.1: KeyError: 'too late'"):
        found = run(encoder.ids_of(encoder.MASK), encoder.MASK)
    torch.testing.assert_close(found, model(encoder.ids_of(encoder.MASK), encoder.MASK))


def test_such_a_fault_is_raised_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken_the_second_time(monkeypatch)
    with pytest.raises(PassFailed, match="not packed") as caught:
        encoder.compiled(encoder.Encoder())(encoder.ids_of(encoder.MASK), encoder.MASK)
    assert caught.value.pass_name == "unpad"


def test_an_attention_that_is_not_found_again_keeps_padding_in(monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks = match.find_sites, []

    def fewer(*given: Any) -> Any:
        looks.append(given)
        found = run(*given)
        return type(found)(sites=found.sites[1:], misses=found.misses) if len(looks) == 2 else found

    monkeypatch.setattr(match, "find_sites", fewer)
    found = encoder.check(encoder.Encoder())
    assert found.kept is not None
    assert found.kept.rule == "each packed attention is understood"


def test_padding_is_out_where_all_have_their_kernels() -> None:
    with torch.no_grad():
        encoder.compiled(encoder.Encoder())(encoder.ids_of(encoder.MASK), encoder.MASK)
    assert encoder.report().kept is None


# What a fact compares lies row by row.
@pytest.mark.in_turns
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("both", [True, False])
def test_a_loss_over_positions_before_rows(both: bool, reduction: str) -> None:
    def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = (x.transpose(0, 1) if both else x).reshape(-1, encoder.WIDTH)
        found = F.cross_entropy(logits, labels.t().reshape(-1), reduction=reduction)
        return found if reduction == "mean" else (found * (mask.t() if both else mask).reshape(-1)).sum()

    # Ignored where padding would be if labels lay row by row: some labels at padding count.
    flat = torch.where(encoder.MASK.view(-1) == 1, (encoder.ids_of(encoder.MASK) % encoder.WIDTH).t().reshape(-1), -100)
    labels = flat.view(encoder.LENGTH, encoder.BATCH).t().contiguous()
    encoder.check(encoder.Encoder(ending=loss), labels=labels, close=2e-5)


def _shifted(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As losses of language models: each token has the next one's label."""
    following = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(x.reshape(-1, encoder.WIDTH), following.reshape(-1))


@pytest.mark.parametrize("model", [encoder.Decoder, encoder.Encoder, encoder.Windowed])
def test_padding_whose_label_counts_is_computed_too(model: type[encoder.Encoder]) -> None:
    """Padded on the left, the last padding of a row has the first token as its label. It is a query without keys, and no key."""
    mask = encoder.mask_of(4, 10, 1, left=True)
    labels = (encoder.ids_of(mask) % encoder.WIDTH).masked_fill(mask == 0, -100)
    found = encoder.check(model(ending=_shifted), mask, labels=labels)
    assert "padding that has a label stands before the real tokens of its row" in found.facts
    assert [step.failed for step in found.last] == [()]
    assert found.last[0].fill == (4 + 10 + 1 + 2) / 30


def test_padding_whose_label_counts_behind_real_tokens_is_not_packed() -> None:
    labels = encoder.ids_of(encoder.MASK) % encoder.WIDTH
    found = encoder.check(encoder.Decoder(ending=_shifted), labels=labels)
    assert [step.failed for step in found.last] == [
        ("padding that has a label stands before the real tokens of its row",)
    ]


# Which axes hold rows and positions, however they were split, and whether the model's own value is there.
def test_places_are_axes_that_hold_an_atom() -> None:
    batch, seq, other = _atom(3), _atom(10), _atom(4)
    assert places(((batch,), (seq,), (other,)), seq) == [1]
    assert places(((batch, seq), (other,)), seq) == [0]
    assert places(((other,),), seq) == []
    assert places(((seq,), (other, seq)), seq) == [0, 1]
    assert places((), seq) == []


def test_a_part_of_an_axis_is_found_in_what_was_split() -> None:
    seq, whole = _atom(10), _atom(30)
    assert places(((whole,),), seq) == []
    whole.parts = (_atom(3), seq)
    assert places(((whole,),), seq) == [0]
    # What was split into others is not there any more.
    seq.parts = (_atom(2), _atom(5))
    assert places(((whole,),), seq) == []
