"""Attention that Dynamo leaves to Python is a miss with its modules; what Dynamo compiles all the same is none."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.passes.matching import left_to_python
from attn_compiler.reasons.codes import Code
from attn_compiler.reporting.facts import MissReport
from attn_compiler.torch_private import frames
from attn_compiler.torch_private.observe import Break

Run = Callable[..., Any]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Mlp(nn.Module):
    """Its break is not in the attention: an expert is chosen by its number."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x * n.tolist()[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x), n)


class Tower(nn.Module):
    """run: how a block is called."""

    def __init__(self, run: Run, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x * 2, n)
        return x


class One(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return checkpoint(self.block, x * 2, n, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return checkpoint(block, x, n, use_reentrant=True)


def plain(block: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return block(x, n)


@torch.compiler.disable
def flash_attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


@torch.compiler.disable
def update_attention_mask(x: Tensor) -> Tensor:
    return x + 1


def calls_disabled(x: Tensor, _: Tensor) -> Tensor:
    return flash_attention(x * 2) + 1


def calls_disabled_mask(x: Tensor, _: Tensor) -> Tensor:
    attention_mask = update_attention_mask(x * 2)
    return F.scaled_dot_product_attention(x, x, attention_mask)


def _run(model: Any) -> tuple[list[MissReport], int]:
    """The misses of a training step, and how many sites there were."""
    torch._dynamo.reset()
    reports = attn_compiler.explain(model, torch.randn(1, 2, 6, 4, requires_grad=True), torch.tensor([2]))
    return [miss for report in reports for miss in report.misses], reports.num_sites


def test_a_break_inside_of_a_checkpoint_leaves_its_attention_to_python() -> None:
    (miss,), sites = _run(One(Block()))
    assert (miss.modules, miss.anchor, miss.reason.code, sites) == (
        ("block.attn",),
        "checkpoint",
        Code.LEFT_TO_PYTHON,
        0,
    )
    assert "leaves Block to Python: Data dependent operator" in miss.reason.observed
    assert miss.source is not None
    assert miss.source.startswith("test_left_to_python.py:")
    assert miss.source != miss.stopped_at


def test_layers_that_call_their_checkpoint_by_a_function_are_told_once_each_frame() -> None:
    misses, sites = _run(Tower(reentrant))
    assert [miss.reason.code for miss in misses] == [Code.LEFT_TO_PYTHON]
    assert sites == 0


class InALoop(Tower):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x * 2, n, use_reentrant=False)
        return x


def test_a_loop_over_checkpoints_that_dynamo_gives_up_has_all_of_them() -> None:
    (miss,), sites = _run(InALoop(plain))
    assert (miss.modules, sites) == (("blocks.0.attn", "blocks.1.attn"), 0)


def test_outside_of_a_checkpoint_the_same_break_costs_no_attention() -> None:
    misses, sites = _run(Tower(plain))
    assert (misses, sites) == ([], 1)


def test_a_checkpoint_without_attention_is_no_miss() -> None:
    misses, _ = _run(InALoop(plain, Mlp))
    assert misses == []


def test_an_attention_that_is_not_to_be_traced_is_a_miss() -> None:
    (miss,), _ = _run(calls_disabled)
    assert (miss.anchor, miss.reason.code) == ("flash_attention", Code.LEFT_TO_PYTHON)
    assert miss.reason.remedy == "call flash_attention without torch.compiler.disable"


class PagedAttentionCache:
    @torch.compiler.disable
    def update(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_cache_that_is_not_to_be_traced_is_no_attention() -> None:
    """As in transformers' continuous batching."""
    cache = PagedAttentionCache()
    misses, sites = _run(lambda x, _: F.scaled_dot_product_attention(x, cache.update(x * 2), x))
    assert (misses, sites) == ([], 1)


class Kept(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class KeptAttention(Kept):
    pass


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = KeptAttention()

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.self_attn(x * 2)


def test_a_module_that_is_not_to_be_traced_is_told_by_its_call() -> None:
    (miss,), _ = _run(Owner())
    assert (miss.anchor, miss.reason.code) == ("Kept.forward", Code.LEFT_TO_PYTHON)


def test_a_mask_that_is_not_to_be_traced_is_no_attention() -> None:
    misses, sites = _run(calls_disabled_mask)
    assert (misses, sites) == ([], 1)


SKIPPED = """Attempted to call function marked as skipped
  Explanation: Dynamo does not know how to trace the builtin `{module}.{name}.`

  Developer debug context: module: {module}, qualname: {name}, skip reason: <missing reason>
"""


@pytest.mark.parametrize(
    ("module", "name", "named"),
    [("flash_attn_2_cuda", "fwd", "flash_attn"), ("mine", "attention_fwd", "an op of its own")],
)
def test_a_function_of_c_that_is_an_attention_is_its_librarys(module: str, name: str, named: str) -> None:
    miss = left_to_python.find(_break(SKIPPED.format(module=module, name=name)))
    assert miss is not None
    assert (miss.anchor, miss.reason.code) == (f"{module}::{name}", Code.LIBRARY_KERNEL)
    assert miss.reason.observed.endswith(named)
    assert left_to_python.find(_break(SKIPPED.format(module="_struct", name="calcsize"))) is None


def _break(reason: str) -> Break:
    frame = traceback.FrameSummary("model.py", 3, "forward", line="out = kernel.fwd(q, k, v)")
    return Break(graph="0/0", reason=reason, stack=(frame,), modules={}, settings={})


# ---- what Dynamo can't enter --------------------------------------------------------------------------------------------


def in_the_old_scope(x: Tensor, _: Tensor) -> Tensor:
    y = x * 2
    with torch.backends.cuda.sdp_kernel(enable_flash=True, enable_math=True):
        y = F.scaled_dot_product_attention(y, y, y)
    return y + 1


@contextlib.contextmanager
@torch.compiler.disable
def timed() -> Iterator[None]:
    """What Dynamo can't enter."""
    yield


def in_a_timer(x: Tensor, _: Tensor) -> Tensor:
    with timed():
        y = F.scaled_dot_product_attention(x, x, x)
    return y + 1


def after_a_timer(x: Tensor, _: Tensor) -> Tensor:
    with timed():
        x = x + 1
    return F.scaled_dot_product_attention(x, x, x)


def before_a_timer(x: Tensor, _: Tensor) -> Tensor:
    x = F.scaled_dot_product_attention(x, x, x)
    with timed():
        return x + 1


@pytest.mark.filterwarnings("ignore")
def test_what_is_inside_of_the_old_scope_is_a_miss() -> None:
    (miss,), sites = _run(in_the_old_scope)
    assert (miss.anchor, miss.reason.code, sites) == ("with", Code.LEFT_TO_PYTHON, 0)
    assert "sdp_kernel(enable_flash=True" in miss.reason.observed
    assert miss.reason.remedy is not None
    assert miss.reason.remedy.startswith("remove this `with`")


def test_what_is_inside_of_a_scope_that_dynamo_cant_enter_is_a_miss() -> None:
    (miss,), sites = _run(in_a_timer)
    assert (miss.reason.observed, sites) == (
        "Dynamo can't enter `with timed()`, and leaves the rest of the function to Python",
        0,
    )
    assert miss.reason.remedy == "enter this `with` around the call of the compiled model, or remove it"


def test_what_is_behind_it_is_left_to_python_too() -> None:
    (miss,), sites = _run(after_a_timer)
    assert (miss.anchor, sites) == ("with", 0)


def test_what_is_in_front_of_it_is_compiled() -> None:
    misses, sites = _run(before_a_timer)
    assert (misses, sites) == ([], 1)


# ---- what a checkpoint stores -------------------------------------------------------------------------------------------


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor, stored: dict[str, Tensor]) -> Tensor:
        stored["x"] = x * 2
        return self.attn(x)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Storing()

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        stored: dict[str, Tensor] = {}
        return checkpoint(self.block, x * 2, stored, use_reentrant=False) + stored["x"]


def test_a_checkpoint_that_stores_something_is_told_of_dynamos_switch() -> None:
    (miss,), sites = _run(Shared())
    assert (miss.modules, sites) == (("block.attn",), 0)
    assert miss.reason.remedy is not None
    assert f"torch._dynamo.config.{frames.STORING_ONCE} = True before the first call" in miss.reason.remedy
    with torch._dynamo.config.patch(**{frames.STORING_ONCE: True}):
        misses, sites = _run(Shared())
    assert (misses, sites) == ([], 1)


def test_a_call_that_stores_once_leaves_the_switch_as_it_was() -> None:
    seen = frames.storing_once(lambda: getattr(torch._dynamo.config, frames.STORING_ONCE))()
    assert (seen, getattr(torch._dynamo.config, frames.STORING_ONCE)) == (True, False)
