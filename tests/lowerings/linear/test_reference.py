"""`linear_reference` computes what a form says, in the dtypes of the function, and is made of ops that Inductor sees."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear.reference import LinearReference, run
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms


def test_it_is_the_definition() -> None:
    for form, given in linear_forms.problems(length=90):
        out, last = run(given, form.text)
        torch.testing.assert_close((out, last), definition(form, given), rtol=1e-4, atol=1e-4)
        assert out.is_contiguous()
        assert last.is_contiguous()


def test_it_gives_the_dtypes_of_the_function() -> None:
    for form, given in linear_forms.problems(length=5):
        narrow = dataclasses.replace(form, out_dtype="bfloat16")
        out, last = run(given, narrow.text)
        assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_the_inner_compiler_sees_its_ops() -> None:
    op = LinearReference().op
    for form, given in linear_forms.problems(length=90):
        traced = make_fx(lambda *x, text=form.text: op(list(x), text))(*given)
        called = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
        ours = {name for name in called if name.startswith("attn_compiler.")}
        of_form = {"attn_compiler.linear_channel_pairs.default"} if form.channel else set()
        assert ours == {"attn_compiler.linear_scan.default"} | of_form


def test_it_takes_every_call() -> None:
    assert LinearReference().why_not(linear_forms.spec(), Target.fake(sm=90)) == []
