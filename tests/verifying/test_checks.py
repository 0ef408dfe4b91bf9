"""What a check asks for before anything runs, and what it says of a site that can't be checked."""

from __future__ import annotations

import torch

from attn_compiler.verifying.values import Key, Values
from tests.verifying.planning import causal, planned, qkv


def test_what_it_needs_is_what_it_reads() -> None:
    found = planned(causal, *qkv())
    mask, output = found.check("mask"), found.check("output")
    assert {key.name for key in mask.needs} == {"le"}
    assert mask.needs < output.needs
    assert {"l_q_", "l_k_", "l_v_"} < {key.name for key in output.needs}
    recorded: dict[Key, torch.Tensor] = {}
    values = Values(bodies=found.plan.mirrors, recorded=recorded)
    output.find_needs(values)
    assert recorded == {}


def test_a_site_without_a_kernel_has_nothing_to_compare() -> None:
    check = planned(causal, *qkv(), lowerings=("untouched",)).check("output")
    assert check.skipped == "the site is as the model made it"
    assert check.is_as_it_was


def test_what_was_read_is_said() -> None:
    found = planned(causal, *qkv())
    assert (found.check("mask").formula, found.check("output").formula) == ("k <= q", None)
    found.check("mask").site.condition = None
    assert found.check("mask").formula is None
