"""A hundred lengths and batch sizes want as many graphs of each family as `aot_eager`: `pytest -m survey` runs all families.

PyTorch's own tracing may add a guard, which `backend="eager"` does not do. Gemma 2 and gpt-oss have 4 graphs that way and not 3: a
slice of the window's length is asked whether it is contiguous.
"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import attn_compiler
from tests.hf.family import Family, Size
from tests.hf.survey import FAMILIES

#: of models whose images or windows have one size, the batch alone changes
SIZES = [Size(batch=r.randint(2, 6), seqlen=r.randint(5, 40)) for r in map(random.Random, range(100))]
OPTIONS = {"inner": "eager", "cache_rewrites": False}
#: of the default run
FEW = (("llama", "sdpa", False), ("bert", "eager", True))


def _graphs(family: Family, impl: str, *, training: bool, ours: bool) -> int:
    """Number of graphs that Dynamo captures for all sizes, in a process of its own."""
    torch._dynamo.reset()
    counters.clear()
    model = family.build(impl).train(training)
    how: dict[str, Any] = {"backend": "attn_compiler", "options": OPTIONS} if ours else {"backend": "aot_eager"}
    compiled = torch.compile(model, **how)
    with torch.set_grad_enabled(training):
        for size in SIZES:
            compiled(**family.inputs(size))
    return counters["stats"]["unique_graphs"]


def _check(name: str, impl: str, training: bool) -> None:
    """Count in a process each: what one run left in memory does not change the other's guards."""
    command = [sys.executable, "-m", __name__, name, impl, str(int(training))]
    theirs, ours = (
        int(subprocess.run([*command, side], capture_output=True, text=True, check=True).stdout.split()[-1])
        for side in ("theirs", "ours")
    )
    assert ours == theirs


@pytest.mark.parametrize(("name", "impl", "training"), FEW)
def test_a_hundred_sizes_want_no_further_graph(name: str, impl: str, training: bool) -> None:
    _check(name, impl, training)


@pytest.mark.survey
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("name", "impl"), [(family.name, impl) for family in FAMILIES for impl in family.impls])
def test_a_hundred_sizes_want_no_further_graph_of_any_family(name: str, impl: str, training: bool) -> None:
    _check(name, impl, training)


if __name__ == "__main__":
    asked, asked_impl, is_training, side = sys.argv[1:]
    of_name = next(family for family in FAMILIES if family.name == asked)
    found = _graphs(of_name, asked_impl, training=is_training == "1", ours=side == "ours")
    assert side != "ours" or attn_compiler.reports()
    sys.stdout.write(f"{found}\n")
