"""Programs as graphs, the site in them, and what is asked first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.plain.reference import Reference
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash
from attn_compiler.passes.graph.axes import Atom
from attn_compiler.passes.graph.site import Operand, Refused, Term
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.attention import AttentionSpec
from tests.passes.compiling import compiled, mark

# The operands that a kernel gets.
B, H, HKV, S, D = 2, 4, 2, 6, 8
NAMES = ("q", "k", "v", "mask")


def _operands(
    function: Callable[..., Tensor], *inputs: Tensor, monkeypatch: pytest.MonkeyPatch, close: float = 2e-5
) -> dict[str, Tensor]:
    """What the kernel is given when function(*inputs) runs: the real tensors, by name."""
    given: dict[str, Tensor] = {}
    emit = SdpaCpuFlash.emit

    def spy(self: SdpaCpuFlash, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        names = [name for name in NAMES if getattr(operands, name) is not None]
        nodes = [getattr(operands, name) for name in names]
        emitter.call(_keep(given, names), *nodes)
        return emit(self, emitter, spec, operands)

    monkeypatch.setattr(SdpaCpuFlash, "emit", spy)
    run = compiled(function, inner="eager")
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=close, rtol=close)
    return given


def _keep(given: dict[str, Tensor], names: list[str]) -> Callable[..., None]:
    def keep(*tensors: Tensor) -> None:
        given.update(zip(names, tensors, strict=True))

    return keep


def _kv(*shape: int) -> Tensor:
    return torch.randn(shape or (B, HKV, S, D))


def _q() -> Tensor:
    return torch.randn(B, H, S, D)


def test_grouped_heads_read_the_tensor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        return F.softmax(q @ k.mT * 0.5, -1) @ k

    q, kv = _q(), _kv()
    given = _operands(function, q, kv, monkeypatch=monkeypatch)
    assert torch.equal(given["q"], q)
    assert torch.equal(given["k"], kv)
    assert given["k"].data_ptr() == given["v"].data_ptr() == kv.data_ptr()


def test_flattened_heads_are_unflattened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, kv: Tensor) -> Tensor:
        k = kv[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B * H, S, D)
        return torch.bmm(F.softmax(torch.bmm(q.view(B * H, S, D), k.mT), -1), k)

    q, kv = _q(), _kv()
    given = _operands(function, q, kv, monkeypatch=monkeypatch)
    assert torch.equal(given["q"], q)
    assert torch.equal(given["k"], kv)


def test_keys_first_in_the_model_are_turned_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(S, B, H, D)
    q = _q()
    given = _operands(
        lambda q, k: F.softmax(torch.einsum("bhqd,kbhd->bhqk", q, k), -1) @ k.permute(1, 2, 0, 3),
        q,
        keys,
        monkeypatch=monkeypatch,
    )
    assert torch.equal(given["k"], keys.permute(1, 2, 0, 3))
    assert torch.equal(given["v"], keys.permute(1, 2, 0, 3))


def test_factors_known_at_run_time_are_on_q(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, t = _q(), _q(), torch.tensor(0.3)
    given = _operands(lambda q, k, t: F.softmax(q @ k.mT * t / t / t, -1) @ k, q, k, t, monkeypatch=monkeypatch)
    torch.testing.assert_close(given["q"], q / t)


def test_dtypes_are_those_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.softmax(q @ q.mT, -1) @ q

    given = _operands(function, _q(), monkeypatch=monkeypatch, close=2e-2)
    assert {given[name].dtype for name in ("q", "k", "v")} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda m: m, lambda m: m),
        (lambda m: m.expand(B, H, S, S).contiguous(), lambda m: m),
        (lambda m: -m, lambda m: -m),
        (lambda m: m[0, 0], lambda m: m[:1, :1]),
        (lambda m: m[:, :, -1:, :], lambda m: m[:, :, -1:, :]),
    ],
    ids=["as it is", "expanded", "negated", "lower rank", "one row"],
)
def test_masks_keep_the_size_one_where_they_do_not_vary(
    make: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, mask = _q(), torch.randn(B, 1, S, S)
    given = _operands(lambda q, m: F.softmax(q @ q.mT + make(m), -1) @ q, q, mask, monkeypatch=monkeypatch)
    assert torch.equal(given["mask"], wanted(mask))


def test_everything_that_is_added_and_masked_is_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, a: Tensor, b: Tensor, shut: Tensor) -> Tensor:
        return F.softmax(((q @ q.mT + a) * 0.5 - b).masked_fill(shut, -torch.inf), -1) @ q

    q, a, b = _q(), torch.randn(1, H, S, S), torch.randn(B, 1, 1, S)
    shut = torch.rand(S, S) > 0.8
    shut[:, 0] = False
    given = _operands(function, q, a, b, shut, monkeypatch=monkeypatch)
    torch.testing.assert_close(given["mask"], (0.5 * a - b).masked_fill(shut, -torch.inf))


def test_a_mask_of_each_group_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that share a key head are merged with it again: the mask's heads come out in the same order."""

    def function(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        k = kv[:, :, None]
        return (F.softmax(q.unflatten(1, (HKV, 2)) @ k.mT + mask, -1) @ k).flatten(1, 2)

    q, kv, mask = _q(), _kv(), torch.randn(B, HKV, 2, S, S)
    given = _operands(function, q, kv, mask, monkeypatch=monkeypatch)
    assert torch.equal(given["mask"], mask.flatten(1, 2))
    assert torch.equal(given["k"], kv)


# ---- what masks do not depend on ----------------------------------------------------------------------------------

KEYS = 7
PADDING = torch.tensor([[1] * KEYS, [1, 0, 1, 1, 1, 0, 1]])
LOWEST = torch.finfo(torch.float32).min


def _rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-2])[:, None]


def _padding_of_every_row(q: Tensor, padding: Tensor) -> Tensor:
    return (padding != 0)[:, None, None, :] & (_rows(q) >= 0)


NARROW: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "bool": (_padding_of_every_row, (B, 1, 1, KEYS)),
    "additive": (
        lambda q, p: torch.zeros(B, 1, q.shape[-2], KEYS).masked_fill(~_padding_of_every_row(q, p), LOWEST),
        (B, 1, 1, KEYS),
    ),
    "of every head": (
        lambda q, p: _padding_of_every_row(q, p) & torch.ones(H, 1, 1, dtype=torch.bool),
        (B, 1, 1, KEYS),
    ),
    "copied for every row": (
        lambda q, p: (p != 0)[:, None, None, :].expand(-1, H, q.shape[-2], -1).clone(),
        (B, 1, 1, KEYS),
    ),
    "the same for all of the batch": (
        lambda q, p: (_rows(q) >= torch.arange(KEYS)) & torch.ones(B, 1, 1, 1, dtype=torch.bool),
        (1, 1, S, KEYS),
    ),
    "a bias for each head and key": (
        lambda q, p: torch.arange(1.0, 1 + H)[:, None, None] * (torch.arange(KEYS) + 0 * _rows(q)),
        (1, H, 1, KEYS),
    ),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_a_mask_has_one_element_along_what_it_does_not_depend_on(
    monkeypatch: pytest.MonkeyPatch, name: str, dynamic: bool
) -> None:
    make, shape = NARROW[name]

    def function(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=make(q, padding))

    inputs = [_q(), _kv(B, H, KEYS, D), PADDING.clone()]
    if dynamic:
        mark(inputs[0], [S])
    given = _operands(function, *inputs, monkeypatch=monkeypatch)
    assert given["mask"].shape == shape


def test_a_mask_of_two_terms_depends_on_what_either_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        padded = torch.zeros(B, 1, S, KEYS).masked_fill(~_padding_of_every_row(q, padding), LOWEST)
        later = (_rows(q) < torch.arange(KEYS)) & torch.ones(B, H, 1, 1, dtype=torch.bool)
        return (q @ k.mT + padded).masked_fill(later, LOWEST).softmax(-1) @ k

    given = _operands(function, _q(), _kv(B, H, KEYS, D), PADDING, monkeypatch=monkeypatch)
    assert given["mask"].shape == (B, 1, S, KEYS)


WHOLE: dict[str, Callable[..., Tensor]] = {
    "one row is another": lambda q, m: _padding_of_every_row(q, PADDING) | (_rows(q) == S - 1),
    "ready-made": lambda q, m: m,
    "edited in one row": lambda q, m: _edited(_padding_of_every_row(q, PADDING)),
    "another number of a mask in one row": lambda q, m: torch.where(
        _padding_of_every_row(q, PADDING), 0.0, torch.where(_rows(q) == 0, -torch.inf, LOWEST)
    ),
}


def _edited(mask: Tensor) -> Tensor:
    mask[:, :, 2] = True
    return mask


@pytest.mark.parametrize("name", WHOLE)
def test_a_mask_that_may_differ_from_row_to_row_is_left_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def function(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=WHOLE[name](q, mask))

    mask = (PADDING != 0)[:, None, None, :].expand(-1, 1, S, -1).clone()
    given = _operands(function, _q(), _kv(B, H, KEYS, D), mask, monkeypatch=monkeypatch)
    assert given["mask"].shape == (B, 1, S, KEYS)


@pytest.mark.parametrize(
    ("factor", "dtype"), [(3e5, torch.float32), (1.5, torch.float32), (-1.0, torch.float16), (0.25, torch.float16)]
)
def test_a_bias_is_scaled_in_the_dtype_of_the_scores(
    factor: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 has no number for 1e5. A product that has the digits of the bias needs no wider one."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = ((q @ k.mT).float() + bias) * factor
        return F.softmax(scores, -1).to(v.dtype) @ v

    q, k, v = (torch.randn(B, H, S, D, dtype=torch.float16) / 100 for _ in range(3))
    bias = (torch.arange(S * S, dtype=torch.float16) / 8).view(S, S)
    given: list[torch.dtype] = []

    def spy(self: Reference, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        assert operands.mask is not None
        given.append(emitter.value(operands.mask).dtype)
        return emit(self, emitter, spec, operands)

    emit = Reference.emit
    monkeypatch.setattr(Reference, "emit", spy)
    run = compiled(function, inner="eager", lowering="reference")
    torch.testing.assert_close(run(q, k, v, bias), function(q, k, v, bias), atol=2e-3, rtol=2e-3)
    assert given == [dtype]


def _operand(*own: Atom, reads: dict[Atom, Atom]) -> Operand:
    node = fx.Graph().placeholder("x")
    return Operand(node=node, used=node, dims=(), root=node, root_dims=tuple((atom,) for atom in own), reads=reads)


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


def test_an_operand_varies_along_what_it_has_an_axis_for() -> None:
    heads, keys, repeated, own_heads, own_keys = map(_atom, (4, 6, 2, 4, 6))
    operand = _operand(own_heads, own_keys, reads={heads: own_heads, keys: own_keys})
    assert operand.varies_along(heads)
    assert operand.varies_along(keys)
    assert not operand.varies_along(repeated)


def test_an_axis_that_was_read_above_is_none_of_the_operands() -> None:
    """A head axis that was repeated into being: the root has no atom for it."""
    heads, gone = _atom(4), _atom(4)
    assert not _operand(_atom(6), reads={heads: gone}).varies_along(heads)


def test_an_axis_that_was_split_is_known_by_its_parts() -> None:
    whole = _atom(6)
    operand = _operand(whole, reads={})
    whole.split(sympy.Integer(2))
    assert whole.parts is not None
    inner, site = whole.parts[1], _atom(3)
    operand.reads[site] = inner
    assert operand.varies_along(site)


def test_a_term_may_depend_on_everything_until_it_is_proved_not_to() -> None:
    assert Term(operand=_operand(reads={})).along == "bhqk"


def test_a_refusal_says_why_and_where() -> None:
    node = fx.Graph().placeholder("x")
    refused = Refused(
        code=Code.SOFTMAX_AXIS,
        rule="the softmax is over the keys",
        observed="the queries",
        at=node,
        progress=2,
        remedy="none",
    )
    assert (refused.reason.rule, refused.reason.observed) == ("the softmax is over the keys", "the queries")
    assert refused.at is node
