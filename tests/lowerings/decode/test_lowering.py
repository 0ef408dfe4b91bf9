"""The decode lowering: what it refuses, and decoding loops as models write them, down to the kernel in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands, StoredNodes
from attn_compiler.lowerings.decode import schedule
from attn_compiler.lowerings.decode.lowering import as_read
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.decode.schedule import ScheduleRow
from attn_compiler.spec import target
from attn_compiler.spec.attention import StoredSpec, TensorSpec
from attn_compiler.spec.masks import Dense, MaskSpec
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.lowerings import emitting
from tests.lowerings.specs import make_spec, words
from tests.passes.compiling import compiled, mark

DECODE = by_name("decode")
H200 = Target.fake()
INTERPRETED = Target.fake(device="cpu", triton_interpreted=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def why_not(machine: Target = H200, **spec: Any) -> str:
    return words(DECODE.why_not(make_spec(**{"seqlen_q": 1, "needs_grad": False, **spec}), machine))


# ---- what it takes ------------------------------------------------------------------------------------------------


def test_a_cache_is_not_copied_for_its_alignment_in_float32() -> None:
    assert DECODE.demand(make_spec(dtype="bfloat16")).alignment == 16
    assert DECODE.demand(make_spec(dtype="float32")).alignment == 1


# ---- what it emits ------------------------------------------------------------------------------------------------

FEW = [case for case in cases.CASES if case.seqlen_q <= 16 and not case.dropout_p]


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_named_cases(case: cases.Case) -> None:
    inputs = cases.build(case, needs_grad=False)
    reasons = words(DECODE.why_not(inputs.spec, INTERPRETED))
    if reasons:
        pytest.skip(reasons)
    found = emitting.emit(DECODE, inputs)(*emitting.arguments(inputs))
    exact, plain = (
        numerics.attention(numerics.cast(inputs, dtype)) for dtype in (numerics.exact_dtype(case.dtype), case.dtype)
    )
    factor = numerics.FACTOR if inputs.spec.score.softcap is None else numerics.FACTOR_SOFTCAP
    assert numerics.worst(found, exact) <= factor * numerics.worst(plain, exact) + numerics.floor(exact, case.dtype)


def test_the_call_says_all_that_was_decided() -> None:
    inputs = cases.build(cases.BY_NAME["decode"], needs_grad=False)
    module = emitting.emit(DECODE, inputs)
    (leaf,) = [n for n in module.graph.nodes if n.target is torch.ops.attn_compiler.decode.default]
    call = DecodeCall.from_text(leaf.args[4])
    assert call.spec == inputs.spec
    assert call.schedule == schedule.schedule(inputs.spec, H200)


_BIAS = MaskSpec(dense=Dense(shape=(2, 1, 8, 128), dtype="float32"), reason="an input")


@pytest.mark.parametrize(
    ("spec", "sm", "found"),
    [
        ({}, 90, (128, 8, 3, 8)),
        ({"seqlen_q": 5, "head_dim_v": 72}, 90, (128, 8, 3, 8)),
        ({"head_dim": 64}, 90, (128, 8, 4, 8)),
        # Fewer rows, more rows, another machine.
        ({"seqlen_q": 4}, 90, (64, 4, 4, 4)),
        ({"seqlen_q": 9}, 90, (64, 4, 4, 1)),
        ({"seqlen_q": 9, "batch": "s0"}, 90, (64, 4, 4, 1)),
        # Two programs on a multiprocessor, where each has a tile without splits: 15 x 8 of 132.
        ({"seqlen_q": 9, "batch": 15}, 90, (64, 4, 3, 1)),
        ({"seqlen_q": 9, "batch": 14}, 90, (64, 4, 4, 1)),
        ({"seqlen_q": 9, "batch": 15, "mask": _BIAS}, 90, (64, 4, 4, 1)),
        ({}, 80, (64, 8, 2, 1)),
        # A tensor of pairs spills 190 to 370 bytes of registers there.
        ({"mask": _BIAS}, 90, (64, 4, 4, 1)),
        # A cache in FP8.
        ({"stored": True}, 90, (64, 4, 4, 1)),
        ({"stored": True, "head_dim": 64}, 90, (64, 4, 3, 1)),
        ({"dtype": "float32"}, 90, (32, 4, 1, 1)),
    ],
    ids=str,
)
def test_warps_go_on_alone_with_32_rows_where_that_was_measured(
    spec: dict[str, Any], sm: int, found: tuple[int, ...]
) -> None:
    given = {"heads": 32, "heads_kv": 8, "head_dim": 128, "seqlen_q": 8, "seqlen_kv": 4096, **spec}
    stored = given.pop("stored", False)
    made = make_spec(**given)
    if stored:
        made = dataclasses.replace(made, stored=StoredSpec(k=made.k, v=made.v, k_scaled=True, v_scaled=True))
    chosen = schedule.schedule(made, Target.fake(sm=sm))
    assert (chosen.keys, chosen.warps, chosen.stages, chosen.slices) == found


# ---- from a model's code ------------------------------------------------------------------------------------------

#: a schedule under which short caches are split
_SMALL = ScheduleRow(bytes=4, head_dim=256, rows=64, keys=16, warps=4, stages=1, programs=64, least_keys=16)


@pytest.fixture
def _small() -> Iterator[None]:
    """Interpreted, in many splits of few keys."""
    with (
        mock.patch.object(target, "TRITON_INTERPRETED", not torch.cuda.is_available()),
        mock.patch.object(target, "_triton_version", return_value="3.7.0"),
        mock.patch.object(schedule, "ROWS", (_SMALL,)),
    ):
        yield


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


def _static(q: Tensor, new: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """Two layers of a static cache: written in place, its length counted up, repeated for all query heads."""
    at = torch.arange(new.shape[2], device=q.device) + length
    keys = torch.arange(k.shape[2], device=q.device)
    mask = (keys <= at[:, None])[None, None]
    length.add_(new.shape[2])
    for _ in range(2):
        k.index_copy_(2, at, new)
        v.index_copy_(2, at, new * 2)
        all_k, all_v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, 16) for x in (k, v))
        q = scaled_dot_product_attention(q, all_k, all_v, attn_mask=mask)
    return q


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("queries", [1, 3])
@torch.no_grad()
def test_a_static_cache(queries: int) -> None:
    """One graph for every length; writes come before the read; K and V are neither repeated nor copied."""
    function = compiled(_static, lowering="decode", verify=True)
    ours, theirs = ([x.clone() for x in _tensors((2, 2, 70, 16), (2, 2, 70, 16))] for _ in range(2))
    for length in (0, 1, 16, 17, 33, 70 - queries):
        q, new = _tensors((2, 4, queries, 16), (2, 2, queries, 16))
        counts = [torch.tensor(length, device=DEVICE) for _ in range(2)]
        found, expected = function(q, new, *ours, counts[0]), _static(q, new, *theirs, counts[1])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert counts[0] == counts[1] == length + queries
    assert len(function.graphs) == 1
    assert (function.calls.count("decode"), function.calls.count("decode_count")) == (2, 1)
    assert {"reshape", "repeat_interleave", "scaled_dot_product_attention"} & set(function.calls) == set()
    # The model gives its output away in strides of its own.
    assert {copy.operand for site in function.report.sites for copy in site.copies} <= {"out"}


def _in_fp8(q: Tensor, new: Tensor, k: Tensor, v: Tensor, length: Tensor, scale: Tensor) -> Tensor:
    """A static cache in FP8 with a scale, as one writes it by hand: in place, through a view, since index_copy_ knows no FP8."""
    at = torch.arange(new.shape[2], device=q.device) + length
    mask = (torch.arange(k.shape[2], device=q.device) <= at[:, None])[None, None]
    for cache in (k, v):
        cache.view(torch.uint8).index_copy_(2, at, (new / scale).to(cache.dtype).view(torch.uint8))
    all_k, all_v = ((x.to(q.dtype) * scale)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, 16) for x in (k, v))
    return scaled_dot_product_attention(q, all_k, all_v, attn_mask=mask)


@pytest.mark.usefixtures("_small")
@torch.no_grad()
def test_a_cache_in_fp8_is_read_as_it_is() -> None:
    function = compiled(_in_fp8, lowering="decode", verify=True)
    scale = torch.tensor(0.25, device=DEVICE)
    ours, theirs = ([x.to(torch.float8_e4m3fn) for x in _tensors((2, 2, 70, 16), (2, 2, 70, 16))] for _ in range(2))
    for length in (0, 17, 69):
        q, new = _tensors((2, 4, 1, 16), (2, 2, 1, 16))
        at = torch.tensor(length, device=DEVICE)
        found, expected = function(q, new, *ours, at, scale), _in_fp8(q, new, *theirs, at, scale)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(function.graphs) == 1
    assert function.calls.count("decode") == 1
    assert "float8_e4m3fn" in function.graphs[0].text
    # Nothing makes the cache the model's dtype again.
    assert "reshape" not in function.calls
    assert function.graphs[0].text.count(".to(torch.float32)") == 0


def test_a_machine_without_fp8_reads_what_the_model_made_of_it() -> None:
    cache = TensorSpec(shape=(2, 8, 128, 64), strides=(65536, 8192, 64, 1), dtype="float8_e4m3fn")
    stored = StoredSpec(k=cache, v=cache)
    spec = dataclasses.replace(make_spec(seqlen_q=1, needs_grad=False), stored=stored)
    nodes = {name: fx.Graph().placeholder(name) for name in ("q", "k", "v", "stored_k", "stored_v")}
    kept = StoredNodes(k=nodes["stored_k"], v=nodes["stored_v"])
    operands = Operands(q=nodes["q"], k=nodes["k"], v=nodes["v"], stored=kept)
    assert as_read(spec, operands, Target.fake(sm=86)) == (
        dataclasses.replace(spec, stored=None),
        nodes["k"],
        nodes["v"],
    )
    assert as_read(spec, operands, H200) == (spec, nodes["stored_k"], nodes["stored_v"])


def _growing(q: Tensor, new: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A dynamic cache, as it grows by a token, of a padded batch."""
    k, v = torch.cat([k, new], 2), torch.cat([v, new], 2)
    mask = padding[:, None, None, :].bool()
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), k, v


@pytest.mark.usefixtures("_small")
@torch.no_grad()
def test_a_growing_cache_is_one_graph() -> None:
    function = compiled(_growing, lowering="decode", verify=True)
    k, v = _tensors((2, 2, 33, 16), (2, 2, 33, 16))
    for length in range(33, 38):
        q, new = _tensors((2, 4, 1, 16), (2, 2, 1, 16))
        padding = torch.ones(2, length + 1, dtype=torch.int64, device=DEVICE)
        padding[0, :5] = 0
        given = [mark(x, (length, length + 1)) for x in (q, new, k.clone(), v.clone(), padding)]
        found, expected = function(*given), _growing(q, new, k, v, padding)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        k, v = expected[1:]
    assert len(function.graphs) == 1
    assert function.calls.count("decode") == 1
    assert '"schedule":' in function.graphs[0].text
    assert '"splits":' not in function.graphs[0].text, "they are only known at the launch"


@pytest.mark.usefixtures("_small")
@torch.no_grad()
def test_an_unknown_batch_is_one_graph() -> None:
    function = compiled(_growing, lowering="decode")
    for batch in (3, 5, 7):
        q, new, k, v = _tensors((batch, 4, 1, 16), (batch, 2, 1, 16), (batch, 2, 40, 16), (batch, 2, 40, 16))
        padding = torch.ones(batch, 41, dtype=torch.int64, device=DEVICE)
        padding[:, :9] = 0
        given = [mark(x.clone(), (batch,)) for x in (q, new, k, v, padding)]
        torch.testing.assert_close(function(*given)[0], _growing(q, new, k, v, padding)[0], atol=1e-5, rtol=1e-5)
    assert len(function.graphs) == 1


def _ready_made(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.25 + mask
    return scores.softmax(-1) @ v


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
@torch.no_grad()
def test_an_additive_mask_from_outside_is_read_where_it_lets_something_through(lowest: float) -> None:
    """As transformers' generate makes them, outside of what it compiles."""
    q, k, v = _tensors((2, 4, 1, 16), (2, 4, 90, 16), (2, 4, 90, 16))
    mask = torch.full((2, 1, 1, 90), lowest, device=DEVICE)
    mask[0, ..., 20:41] = 0
    mask[1, ..., 33] = 0
    function = compiled(_ready_made, lowering="decode")
    expected = _ready_made(q, k, v, mask)
    k[:, :, :16], k[:, :, 60:], v[:, :, :16], v[:, :, 60:] = torch.nan, torch.nan, torch.nan, torch.nan
    torch.testing.assert_close(function(q, k, v, mask), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("queries", [1, 3])
@torch.no_grad()
def test_a_row_that_is_masked_in_full_is_a_mean(queries: int, heads: int) -> None:
    """Of the keys whose number is the lowest, and of none that got -inf."""
    q, k, v = _tensors((2, 4, queries, 16), (2, 4, 50, 16), (2, 4, 50, 16))
    mask = torch.full((2, heads, queries, 50), torch.finfo(torch.float32).min, device=DEVICE)
    mask[1, 0, :, :7], mask[1, -1, 0, 9], mask[..., 40:] = 0, 0, -torch.inf
    function = compiled(_ready_made, lowering="decode")
    torch.testing.assert_close(function(q, k, v, mask), _ready_made(q, k, v, mask), atol=1e-5, rtol=1e-5)
    assert function.calls.count("decode") == 1


def _hidden(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2], device=k.device)[None, None, None] < lengths[:, None, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("lengths", [(0, 0), (0, 75), (75, 1), (400, -3), (32, 33)], ids=str)
@torch.no_grad()
def test_lengths_of_each_batch_row_whatever_they_are(lengths: tuple[int, int]) -> None:
    q, k, v = _tensors((2, 4, 1, 16), (2, 2, 75, 16), (2, 2, 75, 16))
    given = torch.tensor(lengths, device=DEVICE)
    function = compiled(_hidden, lowering="decode")
    found, expected = function(q, k, v, given), _hidden(q, k, v, given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "keys up to" in function.site.spec.mask.words


@pytest.mark.usefixtures("_small")
@torch.no_grad()
def test_work_follows_the_length() -> None:
    """Programs beyond the length end before they read a key: the rest of the cache may be gone."""
    q, k, v = _tensors((1, 4, 1, 16), (1, 2, 640, 16), (1, 2, 640, 16))
    function = compiled(_hidden, lowering="decode")
    expected = _hidden(q, k, v, torch.tensor([40], device=DEVICE))
    k[:, :, 40:], v[:, :, 40:] = torch.nan, torch.nan
    torch.testing.assert_close(function(q, k, v, torch.tensor([40], device=DEVICE)), expected, atol=1e-5, rtol=1e-5)


def test_with_gradients_the_site_goes_elsewhere() -> None:
    q, k, v = (x.requires_grad_() for x in _tensors((2, 4, 1, 16), (2, 2, 75, 16), (2, 2, 75, 16)))
    function = compiled(_hidden, lowerings=["decode", "sdpa_cpu_flash", "math"])
    function(q, k, v, torch.tensor([7, 9], device=DEVICE))
    refused = {r.lowering: words(list(r.reasons)) for r in function.site.decision.refusals}
    assert function.site.decision.lowering != "decode"
    assert "decode" in refused
