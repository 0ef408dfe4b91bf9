"""Lengths and masks that the graph writes to: before the mask is made, between the making and the attention, after it, elsewhere.

Three things are held: the compiled function is eager's, and so is what it leaves in its inputs; what each mask was proved to be;
and that this is what the model masks with, on the first call's values as they were then (`verify`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import index_expr as ix
from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.lowerings.base import Operands
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.writing import lower
from attn_compiler.verifying.values import Values
from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, normal as random

KEYS = 8
PADDING = torch.tensor([[1] * KEYS, [0] * 3 + [1] * (KEYS - 3)])


@dataclass(frozen=True, kw_only=True)
class Case:
    """words: what the mask of each site was proved to be, in the order of the report. trains: x wants a gradient."""

    function: Callable[..., Tensor]
    words: tuple[str, ...]
    inputs: Callable[[], Sequence[Tensor]]
    trains: bool = False


CASES: dict[str, Case] = {}


def lengths(*numbers: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.tensor(n) for n in numbers]


ONE_LENGTH = lengths(4)


def near_miss(
    *words: str, inputs: Callable[[], Sequence[Tensor]] = ONE_LENGTH, trains: bool = False
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """The decorated function takes x, (B, H, 1, D), and these inputs. It is a case of its own name."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CASES[function.__name__] = Case(function=function, words=words, inputs=inputs, trains=trains)
        return function

    return add


def attend(x: Tensor, mask: Tensor) -> Tensor:
    """One query, which sees KEYS keys; the output has the shape of x."""
    kv = x * torch.arange(KEYS)[:, None].sin()
    return F.scaled_dot_product_attention(x, kv, kv.cos(), attn_mask=mask)


def filled(length: Tensor) -> Tensor:
    """As transformers masks the empty slots of a static cache."""
    return torch.arange(KEYS)[None, :] <= (torch.arange(1) + length)[:, None]


# ---- lengths --------------------------------------------------------------------------------------------------------


@near_miss("keys up to length")
def counted_after_the_mask(x: Tensor, length: Tensor) -> Tensor:
    mask = filled(length)
    length.add_(1)
    return attend(x, mask)


@near_miss("keys up to length")
def counted_after_the_attention(x: Tensor, length: Tensor) -> Tensor:
    out = attend(x, filled(length))
    length.add_(1)
    return out


@near_miss("keys up to length + 2")
def counted_before_the_mask(x: Tensor, length: Tensor) -> Tensor:
    length.add_(2)
    return attend(x, filled(length))


@near_miss("keys up to length + 2")
def counted_before_and_after(x: Tensor, length: Tensor) -> Tensor:
    length.add_(2)
    mask = filled(length)
    length += 3
    out = attend(x, mask)
    length.zero_()
    return out


@near_miss("keys up to length")
def counted_where_the_mask_is_half_made(x: Tensor, length: Tensor) -> Tensor:
    """The position was computed before, and the mask is made of it."""
    position = torch.arange(1) + length
    length.add_(1)
    return attend(x, torch.arange(KEYS)[None, :] <= position[:, None])


@near_miss("keys up to length + 1")
def a_view_taken_before_it_was_counted(x: Tensor, length: Tensor) -> Tensor:
    """A view holds what its tensor holds when it is read."""
    view = length.view(1, 1)
    length.add_(1)
    return attend(x, torch.arange(KEYS)[None, :] <= view)


@near_miss("keys up to lengths[0]", inputs=lambda: [torch.tensor([4, 5])])
def counted_through_another_view(x: Tensor, lengths: Tensor) -> Tensor:
    mask = filled(lengths[0])
    lengths[:1].add_(1)
    return attend(x, mask)


@near_miss("keys up to lengths[0]", inputs=lambda: [torch.tensor([4, 5])])
def another_element_counted_before(x: Tensor, lengths: Tensor) -> Tensor:
    lengths[1:].add_(1)
    return attend(x, filled(lengths[0]))


@near_miss("keys up to other", inputs=lengths(4, 6))
def overwritten_before_the_mask(x: Tensor, length: Tensor, other: Tensor) -> Tensor:
    """What it came in with does not matter."""
    length.copy_(other)
    mask = filled(length)
    length.sub_(4)
    return attend(x, mask)


@near_miss("keys up to a", "keys up to b", inputs=lengths(4, 4))
def two_lengths_that_are_equal(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two layers, each with its own: equal at run time, and two tensors."""
    x = attend(x, filled(a))
    a.add_(1)
    x = attend(x, filled(b))
    b.add_(1)
    return x


@near_miss("keys up to length", "keys up to length + 1")
def counted_between_two_layers(x: Tensor, length: Tensor) -> Tensor:
    x = attend(x, filled(length))
    length.add_(1)
    return attend(x, filled(length))


@near_miss("keys up to length")
def counted_between_two_layers_that_share_a_mask(x: Tensor, length: Tensor) -> Tensor:
    mask = filled(length)
    x = attend(x, mask)
    length.add_(1)
    return attend(x, mask)


@near_miss("keys up to length", "keys up to other", inputs=lengths(4, 1))
def replaced_between_two_layers(x: Tensor, length: Tensor, other: Tensor) -> Tensor:
    """The same name, and another value: the second mask is another one."""
    x = attend(x, filled(length))
    length.copy_(other)
    x = attend(x, filled(length))
    length.add_(1)
    return x


@near_miss("keys up to length", "keys up to length + 1", "keys up to length + 2")
def three_steps_in_one_graph(x: Tensor, length: Tensor) -> Tensor:
    for _ in range(3):
        mask = filled(length)
        length.add_(1)
        x = attend(x, mask)
    return x


# ---- masks ----------------------------------------------------------------------------------------------------------


@near_miss("key padding attention_mask[b, k]", inputs=lambda: [PADDING.clone()])
def padding_edited_before_it_is_read(x: Tensor, attention_mask: Tensor) -> Tensor:
    attention_mask[:, 2] = 0
    return attend(x, attention_mask[:, None, None, :].bool())


@near_miss("key padding attention_mask[b, k]", inputs=lambda: [PADDING.clone()])
def padding_edited_after_it_is_read(x: Tensor, attention_mask: Tensor) -> Tensor:
    mask = attention_mask[:, None, None, :].bool()
    attention_mask[:, 2] = 0
    return attend(x, mask)


@near_miss(
    "key padding kept[b, 0, 0, k]",
    "key padding kept[b, 0, 0, k]",
    inputs=lambda: [PADDING.bool()[:, None, None, :].clone()],
)
def mask_edited_between_two_layers(x: Tensor, kept: Tensor) -> Tensor:
    x = attend(x, kept)
    kept[..., 2] = False
    return attend(x, kept)


@near_miss(
    "keys up to 4 ∧ key padding attention_mask[b, k] ∨ (keys up to 3 ∧ keys from 2 ∧ h = 1)",
    inputs=lambda: [PADDING.clone()],
)
def mask_edited_between_its_making_and_its_use(x: Tensor, attention_mask: Tensor) -> Tensor:
    mask = (attention_mask[:, None, None, :].bool() & (torch.arange(KEYS) < 5)).expand(-1, HEADS, 1, -1).clone()
    mask[:, 1, 0, 2:4] = True
    return attend(x, mask)


@near_miss("keys up to length - 1")
def mask_inverted_under_another_name(x: Tensor, length: Tensor) -> Tensor:
    """`mask` is no longer what made it: it is ¬(k >= length)."""
    mask = torch.arange(KEYS)[None, :] >= length.view(1, 1)
    same = mask.view(1, KEYS)
    same.logical_not_()
    return attend(x, mask)


# ---- bodies of checkpoints ------------------------------------------------------------------------------------------


def checkpointed(body: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = checkpoint(body, *args, use_reentrant=False)
    return result


@near_miss("keys up to length", trains=True)
def counted_after_the_body(x: Tensor, length: Tensor) -> Tensor:
    x = checkpointed(attend, x, filled(length))
    length.add_(1)
    return x


@near_miss("keys up to length + 1", trains=True)
def counted_before_the_body(x: Tensor, length: Tensor) -> Tensor:
    length.add_(1)
    return checkpointed(attend, x, filled(length))


@near_miss("keys up to length", "keys up to length + 1", trains=True)
def counted_between_two_bodies(x: Tensor, length: Tensor) -> Tensor:
    """The body gets the length itself and makes the mask."""
    x = checkpointed(lambda x, length: attend(x, filled(length)), x, length)
    length.add_(1)
    return checkpointed(lambda x, length: attend(x, filled(length)), x, length)


@near_miss("key padding kept[0, 0, 0, k]", inputs=lambda: [PADDING.bool()[1:, None, None, :].clone()], trains=True)
def mask_edited_before_the_body(x: Tensor, kept: Tensor) -> Tensor:
    kept[..., 2] = True
    return checkpointed(attend, x, kept)


# ---- the check ------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> list[Tensor]:
    return [random(BATCH, HEADS, 1, HEAD_DIM, grad=case.trains), *case.inputs()]


def _compiled(case: Case, **more: Any) -> Callable[..., Tensor]:
    attn_compiler.reset()
    torch._dynamo.reset()
    options = {
        "inner": "aot_eager",
        "strict": True,
        "verify": True,
        "lowerings": ("sdpa_cpu_flash", "reference"),
        **more,
    }
    return torch.compile(case.function, backend="attn_compiler", fullgraph=True, options=options)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written(name: str) -> None:
    case = CASES[name]
    wanted, found = _inputs(case), _inputs(case)
    torch.testing.assert_close(_compiled(case)(*found), case.function(*wanted))
    torch.testing.assert_close(found, wanted)
    (report,) = attn_compiler.reports()
    assert not report.misses
    masks = [site.spec.mask for site in report.sites]
    words = [" ∧ ".join(kind.words for kind in mask.read) or mask.reason or "" for mask in masks]
    assert len(words) == len(case.words)
    assert [said.replace("'", "") for said in words] == list(case.words)
    assert len(set(words)) == len(words), "two masks, and one description"
    checks = [check for check in attn_compiler.verifications() if check.subject == "mask"]
    assert [check.skipped for check in checks] == [None] * sum(len(site.modules) for site in report.sites)


@pytest.mark.parametrize(
    "name", ["counted_before_and_after", "counted_between_two_layers", "padding_edited_after_it_is_read"]
)
def test_another_time_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the loads taken as they are in the end, the first call would say so."""
    monkeypatch.setattr(Values, "when", lambda self, version: len(version.node.graph.nodes))
    case = CASES[name]
    with pytest.raises(attn_compiler.reasons.errors.VerificationMismatch):
        _compiled(case)(*_inputs(case))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.trains])
def test_masks_made_anew_of_what_they_load_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that computes the mask from its loads reads them where the kernel stands."""
    made: list[fx.Node] = []

    def anew(mirror: Mirror, site: Site, *more: Any) -> Operands:
        operands = as_it_is(mirror, site, *more)
        made.append(_made_anew(site, operands))
        return dataclasses.replace(operands, mask=made[-1])

    as_it_is = lower._operands
    monkeypatch.setattr(lower, "_operands", anew)
    case = CASES[name]
    wanted, found = _inputs(case), _inputs(case)
    torch.testing.assert_close(_compiled(case, inner="eager", verify=False)(*found), case.function(*wanted))
    torch.testing.assert_close(found, wanted)
    assert len(made) == sum(len(site.modules) for site in attn_compiler.reports()[0].sites)


def _made_anew(site: Site, operands: Operands) -> fx.Node:
    """A node that computes the recovered condition from the tensors that it loads."""
    condition = site.condition
    assert condition is not None
    assert operands.mask is not None
    names = sorted({load.tensor for load in ix.loads(condition)})
    like = operands.mask.meta["example_value"]
    shape = tuple(map(int, like.shape))

    def make(*loaded: Tensor) -> Tensor:
        b, h, q, k = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(shape))
        return evaluate_on(condition, {"b": b, "h": h, "q": q, "k": k}, dict(zip(names, loaded, strict=True))).expand(
            shape
        )

    node = operands.mask.graph.call_function(make, tuple(operands.loads[name] for name in names))
    node.meta["example_value"] = like
    return node


@pytest.mark.parametrize("alias", [lambda both: both[0], lambda both: both.view(2, 1)[0, 0]])
def test_inputs_that_share_memory(alias: Callable[[Tensor], Tensor]) -> None:
    """The length is counted up through another input."""
    case = Case(function=_counted_through_another_input, words=(), inputs=list)

    def result(function: Callable[..., Tensor]) -> Tensor:
        both = torch.tensor([4, 5])
        return function(_inputs(case)[0], alias(both), both)

    torch.testing.assert_close(result(_compiled(case)), result(case.function))
    assert [check.skipped for check in attn_compiler.verifications()] == [None, None, None]


def _counted_through_another_input(x: Tensor, length: Tensor, lengths: Tensor) -> Tensor:
    mask = filled(length)
    lengths.add_(1)
    return attend(x, mask & (torch.arange(KEYS) < length + 1))
