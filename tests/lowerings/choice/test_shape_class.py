"""Classes of shapes, the nearest that was measured, and the cost of an order."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterator

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.choice import measured, priorities, shape_class
from attn_compiler.lowerings.choice.rows import Row
from attn_compiler.lowerings.choice.shape_class import BANDS, MASKS
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec, Dim, SizeRange
from attn_compiler.spec.masks import Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import ScoreChange, Sinks, Softcap
from attn_compiler.spec.target import Target
from benchmarks import bench_select, select_cases
from tests.lowerings.choice import cost
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec

AT = (Index("b"), Index("k"))
PADDING = masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", AT, "int")))
BOUND = masks.KeyBound(side="last", bound=Load("lengths", (Index("b"),), "int"))
DOCUMENT = masks.Document(of_key=Load("ids", AT, "int"))
SINKS, SOFTCAP = Sinks(requires_grad=False), Softcap(cap=30.0)


def proved(*kinds: masks.MaskKind) -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))


@pytest.mark.parametrize(
    ("mask", "changes", "expected"),
    [
        (MaskSpec(), (), "full"),
        (CAUSAL, (), "causal"),
        (BOTTOM_RIGHT, (), "causal"),
        (proved(Causal(), SlidingWindow(left=31, right=None)), (), "window"),
        (proved(SlidingWindow(left=31, right=31)), (), "window"),
        (CAUSAL, (SOFTCAP,), "softcap"),
        (proved(Causal(), SlidingWindow(left=31, right=None)), (SOFTCAP, SINKS), "sinks"),
        (proved(Causal(), PADDING), (), "padding"),
        (proved(Causal(), BOUND), (SINKS,), "lengths"),
        (proved(BOUND, SlidingWindow(left=31, right=None)), (), "lengths"),
        (proved(Causal(), dataclasses.replace(BOUND, side="first")), (), "padding"),
        (proved(dataclasses.replace(BOUND, bound=Load("filled", (), "int"))), (), "padding"),
        (proved(Causal(), BOUND, PADDING), (), "padding"),
        (dense(2, 1, 1, 128), (), "padding"),
        (proved(Causal(), DOCUMENT), (), "tensor"),
        (dense(2, 1, 128, 128), (SOFTCAP,), "tensor"),
        (dense(2, 1, 128, 128, dtype="bfloat16"), (), "added"),
        (CAUSAL, (bias(1, 8, 128, 128),), "added"),
    ],
)
def test_sorts_of_masks(mask: MaskSpec, changes: tuple[ScoreChange, ...], expected: str) -> None:
    assert shape_class.classify(make_spec(mask=mask, changes=changes)).mask == expected
    assert expected in MASKS


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (MaskSpec(), "full"),
        (CAUSAL, "causal"),
        (proved(Causal(), PADDING), "causal"),
        (proved(PADDING), "full"),
        (proved(Causal(), SlidingWindow(left=31, right=None), PADDING), "window"),
        (proved(Causal(), DOCUMENT), "causal"),
    ],
)
def test_bands(mask: MaskSpec, expected: str) -> None:
    assert shape_class.classify(make_spec(mask=mask)).band == expected
    assert expected in BANDS


def test_sizes() -> None:
    shape = shape_class.classify(make_spec(head_dim=64, head_dim_v=96, seqlen_q=512, seqlen_kv=100, heads_kv=2))
    assert (shape.head_dim, shape.seqlens, shape.grouped) == (96, (100, 512), True)
    assert shape.elements == 2 * 8 * 512 * 64


@pytest.mark.parametrize(
    ("sizes", "ranges", "seqlens", "words"),
    [
        (("s0", "s0"), (), (4096, 4096), "any, chosen as for 4096"),
        (("s0", 77), (), (77, 4096), "any, chosen as for 4096"),
        (
            ("s0", "s0"),
            (SizeRange(size="s0", least=2, most=512),),
            (512, 512),
            "any, chosen as for 512 (guards: at most 512)",
        ),
        (
            ("s0", "s0"),
            (SizeRange(size="s0", least=8192),),
            (8192, 8192),
            "any, chosen as for 8192 (guards: at least 8192)",
        ),
        (
            ("s0", "s1"),
            (SizeRange(size="s1", least=2, most=300),),
            (300, 4096),
            "any, chosen as for 300 (guards: at most 300) and chosen as for 4096",
        ),
        ((256, 512), (), (256, 512), None),
    ],
)
def test_a_length_that_is_not_known_is_chosen_for_as_one_that_guards_allow(
    sizes: tuple[Dim, Dim], ranges: tuple[SizeRange, ...], seqlens: tuple[int, int], words: str | None
) -> None:
    spec = dataclasses.replace(make_spec(seqlen_q=sizes[0], seqlen_kv=sizes[1]), ranges=ranges)
    assert shape_class.classify(spec).seqlens == seqlens
    assert shape_class.classify(spec).is_any == (words is not None)
    assert shape_class.words_of_any(spec) == words


def test_other_sizes_that_are_not_known() -> None:
    assert shape_class.classify(make_spec(head_dim="s1")).head_dim is None
    assert shape_class.classify(make_spec(head_dim="s1")).elements is None
    assert shape_class.classify(make_spec(batch="s1")).elements is None
    # Those of q, with the length that it is chosen for as.
    assert shape_class.classify(make_spec(seqlen_q="s1")).elements == 2 * 8 * 4096 * 64


#: what needs a package: of lowerings without one, some one is always there
_OF_PACKAGES = {"fa4", "cudnn"}
#: times the fastest one's, at most
_NEVER_WORSE = 1.2


def _shorter(row: Row) -> Iterator[Row]:
    """Measured rows of such sites, of fewer positions."""
    for other in priorities.ROWS:
        is_like = (other.mask, other.head_dims, other.training) == (row.mask, row.head_dims, row.training)
        both = ((other.band, row.band), (other.grouped, row.grouped))
        is_like = is_like and all(None in pair or pair[0] == pair[1] for pair in both)
        if is_like and other.times and other.seqlens is not None and other.seqlens[0] < shape_class.ANY_LENGTH:
            yield other


def test_what_is_chosen_for_any_length_is_right_for_long_ones_and_never_bad_for_short_ones() -> None:
    """By all measured rows: of lowerings without a package, no other one is much faster at a shorter length."""
    compared = 0
    for row in priorities.ROWS:
        if not row.times or row.seqlens is None or row.seqlens[0] != shape_class.ANY_LENGTH:
            continue
        chosen = next(name for name in row.order if name not in _OF_PACKAGES)
        for other in _shorter(row):
            fastest = min(time for name, time in other.times.items() if name not in _OF_PACKAGES)
            assert other.times[chosen] <= _NEVER_WORSE * fastest, (row, other)
            compared += 1
    assert compared > 50


# Which rows are nearest to a shape.
ROWS = [("a", 1024, 4), ("b", 4096, 4), ("c", 4096, 64), ("d", 4096, 64)]


def _names(*wanted: float) -> list[str]:
    return [name for name, *_ in measured.nearest_rows(ROWS, lambda row: (row[1], row[2])[: len(wanted)], wanted)]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ((4096,), ["b", "c", "d"]),
        ((2000,), ["a"]),
        ((2100,), ["b", "c", "d"]),
        ((9999, 5), ["b"]),
        ((4096, 60), ["c", "d"]),
        ((1100, 64), ["a"]),
        ((0, 0), ["a"]),
    ],
)
def test_the_first_size_decides_as_a_ratio_and_then_the_next(wanted: tuple[float, ...], names: list[str]) -> None:
    assert _names(*wanted) == names


def test_none_of_none() -> None:
    assert measured.nearest_rows([], lambda row: (1,), (1,)) == []


@pytest.mark.parametrize(
    ("seqlens", "far"), [((512, 512), False), ((511, 511), True), ((512, 1024), False), ((512, 1025), True)]
)
def test_half_the_shortest_and_twice_the_keys_are_the_ends(seqlens: tuple[int, int], far: bool) -> None:
    assert measured.is_far(seqlens, 1024) is far


# The model of cost.
H200 = Target.fake()
PYTORCHS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
#: sorts of measured cases in which a tensor joins the scores
WITH_TENSOR = ("padded", "lengths", "window")


@functools.cache
def _measured() -> dict[tuple[str, str, str], float]:
    """(case, pass, side) -> microseconds."""
    with bench_select.RESULTS.open(newline="") as file:
        return {(x["case"], x["pass"], x["side"]): float(x["p50_us"]) for x in csv.DictReader(file) if x["p50_us"]}


@functools.cache
def spec_of(name: str, training: bool) -> AttentionSpec:
    """Of a measured case."""
    return select_cases.spec_of(select_cases.BY_NAME[name], training=training)


def _modelled(side: str, name: str, which: str) -> float:
    forward, both = (cost.seconds(side, spec_of(name, training), H200) for training in (False, True))
    assert forward is not None
    assert both is not None
    return forward if which == "forward" else both - forward


def _pairs(*sorts: str) -> Iterator[tuple[str, str, str, float, float]]:
    """(case, pass, kernel of PyTorch's, its time over ours as it was measured, and as it is modelled)."""
    for (name, which, side), time in _measured().items():
        ours = _measured().get((name, which, "triton"))
        if side in PYTORCHS and ours is not None and name in select_cases.BY_NAME and name.startswith(sorts):
            yield name, which, side, time / ours, _modelled(side, name, which) / _modelled("triton", name, which)


def test_where_the_model_says_that_ours_is_faster_it_was_measured_to_be() -> None:
    said = [pair for pair in _pairs(*WITH_TENSOR) if pair[4] > 1]
    assert [pair for pair in said if pair[3] <= 1] == []
    assert len(said) > 80


def test_with_a_tensor_the_model_misses_cudnn_without_a_diagonal_alone() -> None:
    """It counts less for cuDNN's mask than it was measured to take."""
    missed = [pair for pair in _pairs(*WITH_TENSOR) if pair[3] > 1 >= pair[4]]
    assert {(name.split("_d")[0], side) for name, _, side, *_ in missed} == {
        ("padded", "sdpa_cudnn"),
        ("lengths", "sdpa_cudnn"),
    }


def test_without_a_tensor_the_sign_is_that_of_the_measurement_but_where_they_are_alike() -> None:
    pairs = list(_pairs("causal", "full"))
    wrong = [pair for pair in pairs if (pair[3] > 1) != (pair[4] > 1) and not 0.8 < pair[3] < 1.25]
    assert wrong == []
    assert len(pairs) > 150


def test_a_machine_lowering_or_site_that_it_says_nothing_of() -> None:
    spec = make_spec()
    assert cost.seconds("triton", spec, Target.fake(sm=75)) is None
    assert cost.seconds("hopper", spec, H200) is None
    assert cost.seconds("triton", make_spec(dtype="float32"), H200) is None
    assert cost.seconds("triton", make_spec(head_dim="s0"), H200) is None
    assert cost.seconds("triton", make_spec(head_dim=512), H200) is None
    assert cost.cheapest(("hopper",), spec, H200) is None


def test_twice_the_heads_take_twice_as_long_and_a_backward_takes_more() -> None:
    spec = make_spec(needs_grad=False, mask=dense(2, 1, 128, 128))
    one, two = (cost.seconds("sdpa_cudnn", make_spec(needs_grad=False, mask=spec.mask, heads=h), H200) for h in (8, 16))
    both = cost.seconds("sdpa_cudnn", dataclasses.replace(spec, needs_grad=True), H200)
    assert one is not None
    assert two == pytest.approx(2 * one)
    assert both is not None
    assert both > 2 * one
    # A mask of truth values over keys costs ours nothing for a pair, a diagonal halves its pairs.
    keys = cost.seconds("triton", make_spec(needs_grad=False, mask=dense(2, 1, 1, 128)), H200)
    assert keys == cost.seconds("triton", make_spec(needs_grad=False), H200)
    assert cost.seconds("triton", make_spec(needs_grad=False, mask=CAUSAL), H200) == pytest.approx(keys * 129 / 256)  # type: ignore[operator]
