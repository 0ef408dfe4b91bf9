"""The model's own graph run again: what tells of a write, what the inputs are after it, and how wide an exact run is."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import dropout

from attn_compiler.verifying import whole
from attn_compiler.verifying.numbers import Noise
from attn_compiler.verifying.whole import Called, SeenBackward, fingerprint
from tests.verifying.planning import SHAPE, Planned, Tensor, causal, planned, qkv


def test_a_write_changes_a_fingerprint() -> None:
    x = torch.randn(3, 4)
    before = fingerprint(x)
    assert fingerprint(x.clone()) == before
    x.data[2, 1] += 1e-3
    assert fingerprint(x) != before


@pytest.mark.parametrize(
    "change",
    [lambda x: x.flip(0), lambda x: -x, lambda x: x.roll(1), lambda x: x.index_fill(0, torch.tensor(2), torch.nan)],
    ids=["order", "sign", "moved", "nan"],
)
def test_sums_alone_do_not_tell_it(change: object) -> None:
    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    assert callable(change)
    assert fingerprint(change(x)) != fingerprint(x)


def test_what_is_not_finite_is_the_same_as_itself() -> None:
    x = torch.tensor([torch.nan, torch.inf])
    assert fingerprint(x) == fingerprint(x.clone())


def test_tensors_of_any_kind_have_one() -> None:
    assert fingerprint(torch.empty(0, 3)) == ()
    assert fingerprint(torch.ones(2).to_sparse()) == ()
    assert fingerprint(torch.tensor([1 + 2j]).conj()) != fingerprint(torch.tensor([1 + 2j]))
    assert fingerprint(torch.tensor([True, False])) != fingerprint(torch.tensor([False, True]))


def _written(q: Tensor, k: Tensor, v: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return causal(q, k, v) * counter


def _called(found: Planned) -> Called:
    return Called.now(found.plan, found.args)


def test_a_run_leaves_the_inputs_alone_and_tells_how_it_left_them() -> None:
    inputs = [*qkv(), torch.tensor(3.0)]
    found = planned(_written, *inputs)
    place = next(i for i, may_write in enumerate(found.plan.may_write) if may_write)
    start = float(found.args[place])
    called = _called(found)
    for _ in range(2):
        ran = whole.run_model(called)
        assert float(ran.inputs[place]) == start + 1
        torch.testing.assert_close(ran.outs[0], causal(*inputs[:3]) * (start + 1))
    assert float(found.args[place]) == start
    out, left = whole.results(found.plan, ran.outs, ran.inputs)
    assert out is ran.outs[0]
    assert left is ran.inputs[place]


def test_gradients_are_those_of_what_an_input_held_before() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    found = planned(causal, q, k, v)
    gradient = torch.randn(SHAPE)
    ran = whole.run_model(_called(found), backward=SeenBackward(arrived={0: gradient}))
    expected = torch.autograd.grad(causal(q, k, v), (q, k, v), gradient)
    for mine, theirs in zip(ran.gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_random_numbers_and_shared_memory_set_results_apart() -> None:
    found = planned(lambda q, k, v: causal(dropout(q, 0.5), k, v), *qkv())
    called = _called(found)
    assert "random numbers" in str(called.apart(whole.run_model(called)))
    found = planned(_written, *qkv(), torch.tensor(3.0))
    called = _called(found)
    assert called.apart(whole.run_model(called)) is None


def test_a_parameter_that_is_written_since_is_seen() -> None:
    weight = Parameter(torch.ones(SHAPE[-1]))
    q, k, v = qkv()
    found = planned(lambda q, k, v: causal(q * weight, k, v), q, k, v)
    called = _called(found)
    assert called.changed == []
    weight.data[3] = 2.0
    (place,) = called.changed
    assert called.args[place].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_an_exact_run_is_twice_as_wide(dtype: torch.dtype, wide: torch.dtype) -> None:
    called = _called(planned(causal, *qkv(dtype=dtype)))
    (out,) = whole.again(called, None)
    assert out.dtype == wide
    (noisy,) = whole.again(called, Noise(seed=1))
    assert 0 < float((noisy - out).abs().max()) < 0.05
