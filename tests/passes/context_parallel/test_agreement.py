"""What ranks agree on, the facts that they tell, and the methods that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from attn_compiler import ContextParallel, index_expr as ix
from attn_compiler.context_parallel import rank_sync
from attn_compiler.context_parallel.description import GATHER_LIMIT
from attn_compiler.context_parallel.rank_sync import TOLD, Meeting, RanksDisagree
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.context_parallel import agreement, choosing
from attn_compiler.passes.context_parallel.agreement import RankOutcome, Spread, rewrite_on_all_ranks
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.first_look import SharedGraph
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph import unit
from attn_compiler.passes.graph.unit import Unit, UnitPlace
from attn_compiler.passes.matching import match
from attn_compiler.passes.recovering import recover
from attn_compiler.reasons.errors import ContextParallelUnsupported, PassFailed
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import tracing as torch_tracing
from tests.lowerings.specs import CAUSAL, make_spec
from tests.meshes import fake_mesh
from tests.passes.compiling import captured
from tests.passes.context_parallel import compiled


# A graph is rewritten on all ranks or on none, and where ranks wait for each other in it they meet before each call.
def _together(
    monkeypatch: pytest.MonkeyPatch,
    rewrite: Callable[[], RankOutcome],
    *,
    differs: str | None = None,
    beside: str | None = None,
) -> tuple[list[str], tuple[Meeting, ...]]:
    """What was said, and where ranks meet. differs: what the other rank does otherwise."""
    said: list[str] = []

    def agree(group: str, subject: str, text: str, *, seconds: float) -> None:
        said.append(text)
        if differs is not None:
            raise RanksDisagree(differs)

    monkeypatch.setattr(rank_sync, "agree", agree)
    gm, mirror = captured(lambda x: x.cos(), torch.randn(2, 8, 4))
    mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
    assert mode is not None
    with fake_mesh(2) as mesh:
        cp = ContextParallel(mesh)
        found = Unit.of(gm, Options(context_parallel=cp), UnitPlace(name="", mode=mode))
        call = tuple(agreement.call_facts(gm.graph))
        trial = Spread(cp=cp, beside=() if beside is None else (beside,), mirror=mirror, call=call)
        meetings = rewrite_on_all_ranks(found, trial, rewrite)
    return said, meetings


def _fails(error: Exception) -> Callable[[], RankOutcome]:
    def rewrite() -> RankOutcome:
        raise error

    return rewrite


def test_what_was_found_and_the_options_are_compared_and_the_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,), _ = _together(monkeypatch, lambda: RankOutcome(text="1 attentions", exchanges=True))
    compared, _, told = text.partition(TOLD)
    assert compared.startswith("compiles\n1 attentions\n")
    assert "load_balance: 'head_tail'" in compared
    assert "l_x_: torch.float32 (2, 8, 4)" in told


def test_ranks_meet_by_what_all_of_them_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        _together(monkeypatch, lambda text=text: RankOutcome(text=text, exchanges=True))[1]  # type: ignore[misc]
        for text in ("1 attentions", "1 attentions", "2 attentions")
    ]
    codes = [meetings[0].code for meetings in found]
    assert codes[0] == codes[1] != codes[2]


def test_ranks_with_other_heads_meet_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, meetings = _together(monkeypatch, lambda: RankOutcome(text="a", exchanges=True), beside="7")
    assert [one.group for one in meetings][1] == "7"
    assert meetings[1].code == "a share of the heads"


def test_a_graph_in_which_no_rank_waits_has_no_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _together(monkeypatch, lambda: RankOutcome(text="0 attentions", exchanges=False))[1] == ()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(CannotShard("a rule", "a mask"), ContextParallelUnsupported), (MemoryError("full"), MemoryError)],
)
def test_an_error_is_told_and_then_raised(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(raised):
        _together(monkeypatch, _fails(error))


def test_what_another_rank_does_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextParallelUnsupported, match="rank 1: runs graph 0/0"):
        _together(monkeypatch, lambda: RankOutcome(text="a", exchanges=True), differs="rank 1: runs graph 0/0")


def test_shapes_are_told_of_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.is_grad_enabled()
    (text,), _ = _together(monkeypatch, lambda: RankOutcome(text="a", exchanges=True))
    assert "with gradients: True" in text


# A rewritten graph has to have the attentions that were written, on all ranks.
def _second(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Any) -> None:
    """What a step gives for the rewritten graph is changed."""
    run, looks = getattr(module, name), []

    def changed(*given: Any) -> Any:
        looks.append(given)
        found = run(*given)
        return change(found) if len(looks) == 2 else found

    monkeypatch.setattr(module, name, changed)


@pytest.mark.parametrize(
    ("module", "name"), [(match, "find_sites"), (recover, "recover_specs")], ids=["match", "recover"]
)
def test_an_attention_that_is_not_understood_again_is_an_error(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _second(monkeypatch, module, name, lambda found: type(found)(misses=found.misses))
    with pytest.raises(ContextParallelUnsupported, match="each rewritten attention is understood again") as caught:
        compiled.compile_and_run()
    assert "0 of 1" in str(caught.value)


def test_the_other_ranks_are_told_of_what_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fail(_: Any) -> Any:
        raise MemoryError("full")

    _second(monkeypatch, match, "find_sites", fail)
    with pytest.raises(PassFailed, match="full") as caught:
        compiled.compile_and_run(said=said)
    assert caught.value.pass_name == "agree"
    assert any("error: MemoryError: full" in text for text in said)


def test_what_is_rewritten_is_run() -> None:
    assert compiled.compile_and_run().shape == (compiled.BATCH, compiled.LENGTH, compiled.WIDTH)


# What a rank says of itself.
def _lines(options: dict[str, Any], rank: int = 0, **description: Any) -> set[str]:
    with fake_mesh(2, rank=rank) as mesh:
        return set(agreement.option_facts(Options(context_parallel=ContextParallel(mesh, **description), **options)))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "method": ({}, {"method": "ring"}),
    "load_balance": ({}, {"load_balance": None}),
    "replicated": ({}, {"replicated": ("image",)}),
    "allow": ({}, {"allow": ("length",)}),
    "packed": ({}, {"packed": True}),
    "gather_limit": ({}, {"gather_limit": 1}),
    "verify": ({"verify": True}, {}),
    "lowering": ({"lowering": "math"}, {}),
    "lowerings": ({"lowerings": ("math",)}, {}),
    "inner": ({"inner": "eager"}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_option_has_a_line(name: str) -> None:
    options, description = OTHERS[name]
    differ = _lines({}) ^ _lines(options, **description)
    assert {line.partition(":")[0] for line in differ} == {name}


def test_the_same_options_say_the_same_on_every_rank() -> None:
    assert _lines({}, rank=0) == _lines({}, rank=1)
    assert _lines({}, load_balance="auto") == _lines({}, load_balance="head_tail")
    assert _lines({}, allow=("a", "b")) == _lines({}, allow=("b", "a", "a"))
    assert _lines({"dump_dir": "somewhere", "cache_rewrites": False}) == _lines({})


def test_a_call_is_told_by_its_inputs() -> None:
    graph = compiled.graph_of(
        l_x_=torch.zeros(2, 8, 4).transpose(0, 1).requires_grad_(),
        l_ids_=torch.zeros(2, 8, dtype=torch.int32),
        l_number_=7,
        l_self_modules_q_parameters_weight_=nn.Parameter(torch.zeros(4, 4)),
    )
    with torch.no_grad():
        assert agreement.call_facts(graph) == [
            "with gradients: False",
            "l_x_: torch.float32 (8, 2, 4), strides (4, 32, 1), requires a gradient",
            "l_ids_: torch.int32 (2, 8), strides (8, 1)",
        ]


# How the queries of an attention meet other ranks' keys.
CPU, HOPPER = Target.fake(device="cpu"), Target.fake()


def _site(**changed: Any) -> Any:
    match = SimpleNamespace(out="out", scores=SimpleNamespace(limits=()), axes=SimpleNamespace(query=()))
    given = {"condition": None, "loads": {}, "score_loads": {}} | changed
    return SimpleNamespace(match=match, keyless=None, **given)


def _window(keys: int) -> Expr:
    near = ix.compare(">=", ix.add(Index("k"), Const(keys - 1)), Index("q"))
    return ix.apply("and", ix.compare("<=", Index("k"), Index("q")), near)


def _choice(
    spec: AttentionSpec, asked: str, size: int, limit: int = GATHER_LIMIT, target: Target = CPU, **site: Any
) -> choosing.MethodChoice:
    cp: Any = SimpleNamespace(method=asked, size=size, gather_limit=limit)
    layout = GraphLayout(size=size, group="", is_balanced=False)
    return choosing.choice(_site(**site), spec, cp, layout, target)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "asked", "size", "method"),
    [
        (8, 8, "auto", 4, "all_to_all"),
        (8, 2, "auto", 2, "all_to_all"),
        (8, 2, "auto", 4, "all_gather"),
        (6, 6, "auto", 4, "all_gather"),
        (8, 8, "all_gather", 4, "all_gather"),
        ("s0", 8, "auto", 4, "all_gather"),
        (8, 2, "ring", 2, "ring"),
    ],
)
def test_heads_are_exchanged_where_they_can_be_shared_out(
    heads: Any, heads_kv: Any, asked: str, size: int, method: str
) -> None:
    assert _choice(make_spec(heads=heads, heads_kv=heads_kv), asked, size).method == method


def test_keys_and_values_are_gathered_up_to_a_limit() -> None:
    spec = make_spec(batch=2, heads=8, heads_kv=2, seqlen_q=128, seqlen_kv=128, head_dim=64, head_dim_v=32)
    whole = 4 * 2 * 2 * 128 * (64 + 32) * 2
    assert choosing.gathered_bytes(spec, 4) == whole
    assert _choice(spec, "auto", 4, whole) == choosing.MethodChoice(method="all_gather")
    over = _choice(spec, "auto", 4, whole - 1)
    assert over.method == "ring"
    assert over.why is not None
    assert "gather_limit" in over.why
    assert _choice(spec, "auto", 2, 0).method == "all_to_all"
    assert _choice(spec, "all_gather", 4, 0).method == "all_gather"
    assert choosing.gathered_bytes(make_spec(batch="s0"), 4) == 0


def test_heads_that_can_not_be_shared_out_are_not_exchanged() -> None:
    with pytest.raises(CannotShard) as caught:
        _choice(make_spec(heads=8, heads_kv=2), "all_to_all", 4)
    assert caught.value.reason.observed == "8 and 2 heads for 4 ranks"


@pytest.mark.parametrize(
    ("heads_kv", "size", "method"), [(8, 2, "all_gather"), (8, 8, "all_to_all"), (32, 2, "all_to_all")]
)
@pytest.mark.parametrize("grad", [False, True])
def test_few_keys_are_gathered_on_hopper_where_that_sends_less(
    heads_kv: int, size: int, method: str, grad: bool
) -> None:
    """32 heads of q. With a backward keys travel three times, and all operands twice."""
    spec = make_spec(heads=32, heads_kv=heads_kv, seqlen_q=1024, seqlen_kv=1024, mask=CAUSAL, needs_grad=grad)
    found = _choice(spec, "auto", size, target=HOPPER)
    assert found.method == method
    assert (found.why is None) == (method == "all_to_all")
    # Where rows of intervals were not measured, and where a mask reads tensors, each attention is left as it was.
    assert _choice(spec, "auto", size).method == "all_to_all"
    assert _choice(spec, "auto", size, target=HOPPER, loads={"documents": None}).method == "all_to_all"


def test_a_halo_that_sends_less_comes_before_heads() -> None:
    spec = make_spec(heads=8, heads_kv=8, seqlen_q=1024, seqlen_kv=1024)
    near = _choice(spec, "auto", 2, condition=_window(64))
    assert near.method == "all_gather"
    assert near.why is not None
    assert _choice(spec, "auto", 2, condition=_window(1024 * 2)).method == "all_to_all"
    assert _choice(spec, "all_to_all", 2, condition=_window(64)).method == "all_to_all"


# What is kept of a graph before its attentions are rewritten.
def _unit(attend: Any, data: compiled.Data, **description: Any) -> Unit:
    """Of the graph of a model, rewritten for two ranks."""
    found: list[Unit] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(rewrite(gm, Options(context_parallel=cp, inner="eager", verify=True)).units)
        return gm.forward

    with compiled.fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        cp = ContextParallel(mesh, **description)
        torch.compile(compiled.Model(None, attend, None), backend=backend)(
            torch.randn(compiled.BATCH, compiled.LENGTH, compiled.WIDTH), **data
        )
    (unit,) = found
    return unit


def _of_text(
    model: compiled.Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: compiled.Data
) -> torch.Tensor:
    text = data["text"]
    other = torch.nn.functional.scaled_dot_product_attention(q, model.split(model.k(text)), model.split(model.v(text)))
    return compiled.causal(model, q, k, v, data) + other


@pytest.mark.parametrize("method", ["all_gather", "all_to_all", "ring"])
def test_a_site_of_the_model_s_own_graph_knows_what_took_its_place(method: str) -> None:
    unit = _unit(None, {}, method=method)
    assert isinstance(unit.outcome, SharedGraph)
    look = unit.outcome.first_look
    assert look is not None
    (site,) = look.sites
    assert site not in unit.found.sites
    assert site.spec is not None
    assert (site.spec.seqlen_q, site.spec.mask.is_causal) == (compiled.LENGTH, True)
    assert list(look.axes.values()) == [1]
    assert look.mirror is not unit.mirror
    assert look.is_shared(site)
    assert look.final is not None
    assert look.new_out(site) in {node.name for node in look.final.nodes}
    assert look.new_out(site) not in {node.name for node in look.original.nodes}


def test_a_site_whose_keys_every_rank_has_was_not_rewritten() -> None:
    unit = _unit(_of_text, {"text": torch.randn(compiled.BATCH, 7, compiled.WIDTH)}, replicated=("text",))
    assert isinstance(unit.outcome, SharedGraph)
    look = unit.outcome.first_look
    assert look is not None
    assert [look.is_shared(site) for site in look.sites] == [False, True]
