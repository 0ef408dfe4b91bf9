"""A program's text, inputs and exact run."""

from __future__ import annotations

import itertools

import torch

from tests.fuzz import comparing
from tests.fuzz.program import Input, Program, length

PLAIN = Program(
    rule="sdpa calls",
    inputs=(
        Input(name="q0", shape=("b", "h", "q", "d"), grad=True),
        Input(name="k1", shape=(2, "b", "h", "k", "d"), layout="{}[1]", grad=True),
        Input(name="m2", shape=(1, "k"), kind="kept", layout="{}.expand($q, -1)"),
    ),
    lines=(
        "s = q0 @ k1.mT",
        "s = s.masked_fill(~m2, -inf)",
        "# probe: s.amax(3)",
        "w = F.softmax(s.to(W), -1).to(D)",
        "o = w @ k1",
    ),
    outputs=("o",),
    dtype=torch.bfloat16,
    sizes=(("b", 2), ("h", 2), ("q", 3), ("k", 4), ("d", 4)),
)


def test_sizes_are_numbers_names_and_products() -> None:
    assert [length(size, {"b": 2, "h": 3}) for size in (5, "b", "b*h", "2*h", "h*2*b")] == [5, 2, 6, 6, 12]


def test_inputs_are_what_they_are_called() -> None:
    q, k, kept = PLAIN.bases(PLAIN.calls[0])
    assert q.requires_grad
    assert q.dtype == torch.bfloat16
    assert tuple(k.shape) == (2, 2, 2, 4, 4)
    assert bool(kept[:, 0].all())


def test_a_split_mask_has_both_values_in_each_row_and_column() -> None:
    for seed in range(5):
        x = Input(name=f"m{seed}", shape=("b", 4, 4), kind="split").base(seed, torch.float32, {"b": 3}, "cpu")
        for axis in (1, 2):
            assert bool(x.any(axis).all())
            assert not bool(x.all(axis).any())


def test_a_filled_row_ends_somewhere_and_elsewhere_in_another_call() -> None:
    rows = Input(name="pad0", shape=("b", "q"), kind="filled")
    seen = [rows.base(0, torch.float32, {"b": 5, "q": 7, "fill": fill}, "cpu") for fill in (0, 1, 2, 1)]
    assert all(bool((x.diff(dim=1) <= 0).all()) for x in seen)
    assert all(x[0].sum() >= 2 for x in seen)
    assert torch.equal(seen[1], seen[3])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_the_exact_run_has_the_same_numbers_in_float64() -> None:
    pairs = zip(PLAIN.bases(PLAIN.calls[0]), PLAIN.bases(PLAIN.calls[0], exact=True), strict=True)
    assert all(torch.equal(a.double(), b.double()) for a, b in pairs)
    found = comparing.results(PLAIN, PLAIN.function(exact=True), PLAIN.calls[0], exact=True)
    assert found[0].value is not None
    assert found[0].value.dtype == torch.float64


def test_only_the_eager_run_is_probed() -> None:
    seen: list[torch.Tensor] = []
    comparing.results(PLAIN, PLAIN.function(probe=seen.append), PLAIN.calls[0])
    assert [tuple(x.shape) for x in seen] == [(2, 2, 3)]
    comparing.results(PLAIN, PLAIN.function(), PLAIN.calls[0])
    assert len(seen) == 1
