"""A long sequence of few heads goes in pieces, with the states, results and gradients that it has as one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.lowerings.linear import triton_op, triton_passes
from attn_compiler.lowerings.linear.triton_passes import Pieces
from attn_compiler.lowerings.linear.triton_sizes import LinearSizes
from tests.lowerings.linear.kernels.bounds import within_bounds
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS, furthest, problem

_HALF = dict.fromkeys(("q", "k", "v", "x", "B", "C", "beta"), torch.bfloat16)


def _sizes(length: int, heads: int, dim_k: int = 128, batch: int = 1) -> LinearSizes:
    q, v = (
        torch.empty(batch, length, heads, dim_k, device="meta"),
        torch.empty(batch, length, heads, 128, device="meta"),
    )
    return LinearSizes.of(q, v, is_half=True)


@pytest.mark.parametrize(
    ("sizes", "is_delta", "many"),
    [
        (_sizes(32768, 32), True, 1),
        (_sizes(32768, 8), True, 1),
        (_sizes(32768, 4), True, 4),
        (_sizes(32768, 2), True, 8),
        (_sizes(32768, 8), False, 4),
        (_sizes(32768, 1), False, 32),
        (_sizes(2048, 1), True, 4),
        (_sizes(1024, 1), True, 1),
        (_sizes(32768, 1, batch=8), True, 1),
        (_sizes(32768, 1, dim_k=256), True, 1),
        (_sizes(0, 1), True, 1),
        (dataclasses.replace(_sizes(1024, 1), batch=0), True, 1),
    ],
)
def test_there_are_pieces_where_processors_would_be_idle(sizes: LinearSizes, is_delta: bool, many: int) -> None:
    found = Pieces.of(sizes, 132, is_delta=is_delta)
    assert found.many == many
    assert (found.many - 1) * found.chunks < max(sizes.chunks, 1)
    assert found.many * found.chunks >= sizes.chunks


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_passes, "_SHORTEST", 1)
    monkeypatch.setattr(triton_passes, "_FEWEST", 2)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize(("length", "processors"), [(330, 1000), (600, 60), (450, 48)])
@pytest.mark.parametrize("has_state", [False, True])
def test_pieces_give_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, name: str, length: int, processors: int, has_state: bool
) -> None:
    monkeypatch.setattr(triton_passes, "_PROCESSORS", processors)
    form, sizes = FORMS[name], (length, 1, 2, 16, 24)
    if has_state == ("state" in form.roles):
        given = problem(form, sizes)
    elif has_state:
        return
    else:
        given = [x for role, x in zip(form.roles, problem(form, sizes), strict=True) if role != "state"]
        form = dataclasses.replace(form, roles=tuple(role for role in form.roles if role != "state"))
    with within_bounds():
        found = furthest(form, given)
    assert max(found.values()) < 2e-5, found


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("name", list(FORMS))
def test_pieces_give_what_the_whole_gives_in_bfloat16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    form = FORMS[name] if name == "ssd" else dataclasses.replace(FORMS[name], out_dtype="bfloat16")
    given = problem(form, (330, 1, 2, 16, 24), dtypes=_HALF)
    every = []
    for processors in (1, 1000):
        monkeypatch.setattr(triton_passes, "_PROCESSORS", processors)
        with with_bfloat16():
            outs = triton_op.run(given, form.text)
            noise = [torch.ones_like(x) for x in outs]
            every.append([*outs, *torch.autograd.grad(outs, given, noise)])
    for one, other in zip(*every, strict=True):
        within = 1e-6 if one.dtype == torch.float32 else 1e-3
        assert float((one.double() - other.double()).norm() / one.double().norm()) < within
