"""The rank's program beside that of the whole sequence: a number that was made of the rank's length is refused wherever it comes to stand,
one that only looks like it is taken, and so is one that is the same for both lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.passes.context_parallel import compared
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.context_parallel.compiled import (
    BATCH,
    LENGTH,
    WIDTH,
    Attend,
    Before,
    Data,
    Model,
    compile_and_run,
    positions,
)

_NUMBER = "a number that is made of the sequence's length"
_COUNTED = "was made of how many positions the rank has"


#: numbers of Python, in any op and place
OF_LENGTH: dict[str, Before] = {
    "tensor that holds it": lambda m, x, d: x * torch.tensor(float(x.shape[1])),
    "tensor of two": lambda m, x, d: x * torch.tensor([float(x.shape[1]), 1.0]).sum(),
    "tensor of a list of features": lambda m, x, d: x + torch.tensor([float(x.shape[1])] * WIDTH),
    "full": lambda m, x, d: x * torch.full((1,), x.shape[1] / 7),
    "full_like": lambda m, x, d: x + torch.full_like(x, x.shape[1]),
    "new_full": lambda m, x, d: x + x.new_full((WIDTH,), x.shape[1] * 0.01),
    "logarithm of it": lambda m, x, d: x * math.log(3 + x.shape[1]),
    "sine of it": lambda m, x, d: x * math.sin(x.shape[1]),
    "third of it": lambda m, x, d: x + x.shape[1] / 3,
    "its root": lambda m, x, d: x * x.shape[1] ** -0.5,
    "one by it, added": lambda m, x, d: x + 1 / x.shape[1],
    "its square": lambda m, x, d: x / x.shape[1] ** 2,
    "how many elements": lambda m, x, d: x / x.numel(),
    "how many elements, by a tensor": lambda m, x, d: x * torch.tensor(x.numel()),
    "add with alpha": lambda m, x, d: torch.add(x, x, alpha=x.shape[1]),
    "sub with alpha": lambda m, x, d: torch.sub(x, x, alpha=x.shape[1] / 2),
    "addcmul": lambda m, x, d: torch.addcmul(x, x, x, value=x.shape[1]),
    "addcdiv": lambda m, x, d: torch.addcdiv(x, x, x.exp(), value=1 / x.shape[1]),
    "lerp": lambda m, x, d: torch.lerp(x, x.cos(), x.shape[1] / 100),
    "pow": lambda m, x, d: x.abs() ** (x.shape[1] / 20),
    "pow of a number": lambda m, x, d: x + (1 + 1 / x.shape[1]) ** x,
    "clamp": lambda m, x, d: x.clamp(max=x.shape[1] / 30),
    "threshold": lambda m, x, d: F.threshold(x, 1 / x.shape[1], 0.0),
    "leaky_relu": lambda m, x, d: F.leaky_relu(x, 1 / x.shape[1]),
    "softplus": lambda m, x, d: F.softplus(x, beta=x.shape[1]),
    "elu": lambda m, x, d: F.elu(x, alpha=x.shape[1]),
    "masked_fill": lambda m, x, d: x.masked_fill(x > 0, x.shape[1]),
    "where": lambda m, x, d: torch.where(x > 0, x, float(x.shape[1])),
    "epsilon of a norm": lambda m, x, d: F.layer_norm(x, (WIDTH,), eps=1 / x.shape[1]),
    "in place": lambda m, x, d: x.clone().mul_(x.shape[1]),
    "remainder of features": lambda m, x, d: x % x.shape[1],
    "linspace": lambda m, x, d: x + torch.linspace(0, 1, x.shape[1])[:1],
    "pad": lambda m, x, d: F.pad(x, (0, x.shape[1]))[..., :WIDTH],
    "roll of features": lambda m, x, d: x.roll(x.shape[1] // 8, -1),
    "features up to it": lambda m, x, d: torch.cat((x[..., : x.shape[1] // 3], x[..., x.shape[1] // 3 :]), -1),
    "dropout": lambda m, x, d: F.dropout(x, 1 / x.shape[1]),
    "branch": lambda m, x, d: x * 2 if x.shape[1] > 30 else x,
    "loop": lambda m, x, d: sum((x for _ in range(x.shape[1] // 12)), start=x),
    "dtype": lambda m, x, d: x.double().float() if x.shape[1] < 30 else x.half().float(),
}

#: positions that are compared or combined with it
OF_POSITIONS: dict[str, Before] = {
    "flag of the last": lambda m, x, d: x + (d["position_ids"] == x.shape[1] - 1)[..., None] * 3.0,
    "flag of the last but one": lambda m, x, d: x * (d["position_ids"] != x.shape[1] - 2)[..., None],
    "from the end": lambda m, x, d: x + (x.shape[1] - 1 - d["position_ids"])[..., None] * 0.1,
    "modulo it": lambda m, x, d: x + (d["position_ids"] % x.shape[1])[..., None] * 0.1,
    "divided by it": lambda m, x, d: x + (d["position_ids"] // x.shape[1])[..., None],
    "the first half": lambda m, x, d: x + (d["position_ids"] < x.shape[1] // 2)[..., None],
    "the last quarter": lambda m, x, d: x + (d["position_ids"] >= x.shape[1] * 3 // 4)[..., None],
    "as a fraction": lambda m, x, d: x + (d["position_ids"] / x.shape[1])[..., None],
    "as an angle": lambda m, x, d: x * torch.cos(d["position_ids"] * (math.pi / x.shape[1]))[..., None],
    "clamped": lambda m, x, d: x + m.embedding(d["position_ids"].clamp(max=x.shape[1] - 5)),
    "minimum": lambda m, x, d: x + m.embedding(torch.minimum(d["position_ids"], torch.tensor(x.shape[1] - 5))),
    "twice, compared": lambda m, x, d: x + (d["position_ids"] * 2 < x.shape[1])[..., None],
    "table from its end": lambda m, x, d: x + m.embedding(d["position_ids"] + (90 - x.shape[1])),
    "exclusive or": lambda m, x, d: x + m.embedding(d["position_ids"] ^ x.shape[1]),
}

#: tensors that count the rank's positions, and numbers of them
COUNTED: dict[str, Before] = {
    "ones, summed": lambda m, x, d: x * torch.ones(x.shape[1]).sum(),
    "ones like positions, summed": lambda m, x, d: x / torch.ones(x.shape[1], 1).sum(0),
    "zeros and one, summed": lambda m, x, d: x + (torch.zeros(x.shape[1]) + 1).sum(),
    "the last number": lambda m, x, d: x * torch.arange(x.shape[1])[-1:],
    "the largest number": lambda m, x, d: x * torch.arange(x.shape[1]).max(),
    "its mean": lambda m, x, d: x * torch.arange(x.shape[1]).float().mean(),
    "its norm": lambda m, x, d: x * torch.ones(x.shape[1]).norm(),
    "running sum": lambda m, x, d: x * torch.ones(x.shape[1]).cumsum(0)[-1],
    "trace": lambda m, x, d: x * torch.eye(x.shape[1]).trace(),
    "row of a triangle": lambda m, x, d: x * torch.ones(x.shape[1], x.shape[1]).tril().sum(-1)[-1],
    "padded": lambda m, x, d: x * F.pad(torch.ones(x.shape[1]), (0, 1)).mean(),
    "product": lambda m, x, d: x * (torch.ones(1, x.shape[1]) @ torch.ones(x.shape[1], 1)),
    "weight of a projection": lambda m, x, d: F.linear(x, m.q.weight * torch.ones(x.shape[1]).sum()),
    "repeated, summed": lambda m, x, d: x * m.q.weight[0].expand(x.shape[1], -1).sum(0),
    "index of a table": lambda m, x, d: x + m.embedding(torch.arange(x.shape[1])[-1]),
    "table of numbers, its last row": lambda m, x, d: x + m.embedding(torch.arange(x.shape[1]))[-1],
    "joined to features": lambda m, x, d: torch.cat((x, torch.ones(x.shape[1]).sum().expand(BATCH, LENGTH, 1)), -1)[
        ..., 1:
    ],
}

#: the same whatever the length
TAKEN: dict[str, Before] = {
    "number of the model that is as large as the length": lambda m, x, d: x + float(LENGTH),
    "number of the model beside positions": lambda m, x, d: x + (d["position_ids"] == LENGTH - 1)[..., None],
    "positions modulo one": lambda m, x, d: x + m.embedding(d["position_ids"] % LENGTH),
    "remainder that is the same": lambda m, x, d: x * (1 + x.shape[1] % 4),
    "limit below it": lambda m, x, d: x * min(x.shape[1], 5),
    "branch that both take": lambda m, x, d: x * 2 if x.shape[1] > 3 else x,
    "width": lambda m, x, d: x / math.sqrt(x.shape[2]),
    "batch": lambda m, x, d: x / x.shape[0],
    "ones along it": lambda m, x, d: x * torch.ones(x.shape[1], 1),
    "zeros like it": lambda m, x, d: x + torch.zeros_like(x) + x.new_zeros(x.shape),
    "full of one number": lambda m, x, d: x + torch.full(x.shape[:2], 0.3)[..., None],
    "expanded along it": lambda m, x, d: x + m.embedding.weight[0].expand(BATCH, x.shape[1], -1),
    "flattened and back": lambda m, x, d: m.q(x.reshape(-1, WIDTH)).view(BATCH, x.shape[1], WIDTH),
    "all of it": lambda m, x, d: x[:, : x.shape[1]],
    "repeated for each position, and scaled": lambda m, x, d: (
        x * (m.q.weight[0].expand(x.shape[1], -1) * 2).cos()[None]
    ),
}


def _run(before: Before, **description: object) -> Tensor:
    return compile_and_run(before=before, data={"position_ids": positions()}, **description)


@pytest.mark.parametrize("name", OF_LENGTH)
def test_a_number_of_the_length_is_refused_in_any_op(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported):
        _run(OF_LENGTH[name])


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_positions_beside_a_number_of_the_length_are_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=f"{_NUMBER}|may come from the length"):
        _run(OF_POSITIONS[name])


@pytest.mark.parametrize("name", COUNTED)
def test_a_number_of_what_counts_positions_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=f"{_COUNTED}|computed by itself"):
        _run(COUNTED[name])


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_the_same_for_the_whole_sequence_is_taken(name: str) -> None:
    assert _run(TAKEN[name]).shape == (BATCH, LENGTH, WIDTH)


@pytest.mark.parametrize("name", ["third of it", "add with alpha", "tensor that holds it"])
def test_a_user_may_answer_for_numbers_of_the_length(name: str) -> None:
    assert _run(OF_LENGTH[name], allow=("length",)).shape == (BATCH, LENGTH, WIDTH)


def test_the_error_says_where_and_both_numbers() -> None:
    with pytest.raises(ContextParallelUnsupported) as caught:
        _run(OF_LENGTH["add with alpha"])
    error = caught.value
    assert f"alpha={LENGTH} for the rank's part, {2 * LENGTH} for the whole sequence" in error.observed
    assert error.remedy is not None
    assert "allow=('length',)" in error.remedy
    assert error.source is not None


# ---- views -------------------------------------------------------------------------------------------------------------------

#: the rank's length divides WIDTH or is a multiple of a part of it
_SHORT = 8

REGROUPED: dict[str, Before] = {
    "transposed, as x": lambda m, x, d: x.transpose(1, 2).reshape(x.shape),
    "transposed twice": lambda m, x, d: x.transpose(1, 2).reshape(x.shape).cos(),
    "permuted, as x": lambda m, x, d: x.permute(0, 2, 1).contiguous().view(x.shape),
    "flattened after a transpose": lambda m, x, d: x.transpose(1, 2).flatten(1).view(x.shape),
    "split and transposed": lambda m, x, d: x.unflatten(2, (2, -1)).transpose(1, 3).reshape(x.shape),
    "heads left before positions": lambda m, x, d: x.unflatten(2, (2, -1)).transpose(1, 2).reshape(x.shape),
    "batch between": lambda m, x, d: x.transpose(0, 1).reshape(x.shape),
    "positions last": lambda m, x, d: x.movedim(1, 2).reshape(BATCH, -1, WIDTH),
    "positions as features": lambda m, x, d: x.reshape(BATCH, WIDTH, -1).transpose(1, 2).reshape(x.shape),
    "as many rows as positions": lambda m, x, d: (
        x.reshape(-1).view(x.shape[1], -1).reshape(x.shape) + x.mT.reshape(x.shape)
    ),
    "swapaxes": lambda m, x, d: torch.swapaxes(x, 1, 2).reshape(*x.shape),
}


def _short(before: Before) -> Tensor:
    with_positions = {"position_ids": torch.arange(_SHORT).expand(BATCH, _SHORT).contiguous()}
    return compile_and_run(after=before, data=with_positions, length=_SHORT)


@pytest.mark.parametrize("name", REGROUPED)
def test_a_view_that_means_something_else_for_another_length_is_refused(name: str) -> None:
    assert WIDTH % _SHORT == 0
    with pytest.raises(ContextParallelUnsupported):
        _short(REGROUPED[name])


@pytest.mark.parametrize(
    "before",
    [
        lambda m, x, d: x.transpose(1, 2).reshape(BATCH, WIDTH, -1).transpose(1, 2),
        lambda m, x, d: x.unflatten(2, (2, -1)).transpose(1, 2).transpose(1, 2).flatten(2),
        lambda m, x, d: x.flatten(0, 1).view(BATCH, -1, WIDTH),
        lambda m, x, d: x.view(BATCH, x.shape[1], 2, 8).permute(2, 0, 1, 3).permute(1, 2, 0, 3).reshape(x.shape),
    ],
)
def test_a_view_that_keeps_positions_together_is_taken(before: Before) -> None:
    assert _short(before).shape == (BATCH, _SHORT, WIDTH)


# ---- masks -------------------------------------------------------------------------------------------------------------------


def _masked(limit: object) -> Attend:
    def attend(model: Model, q: Tensor, k: Tensor, v: Tensor, data: Data) -> Tensor:
        at = torch.arange(q.shape[2])
        mask = limit(at[:, None], at[None], q.shape[2])  # type: ignore[operator]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


MASKS: dict[str, Attend] = {
    "third": _masked(lambda q, k, n: (k <= q) | (k < n // 3)),
    "all but seven": _masked(lambda q, k, n: (k <= q) & (k < n - 7)),
    "scaled distance": _masked(lambda q, k, n: (k - q) * (0.5 / n)),
    "root": _masked(lambda q, k, n: (k <= q) & (q - k < int(n**0.5))),
    "filled with it": _masked(lambda q, k, n: (q * 0.0).expand(n, n).masked_fill(k > q, -100.0 * n)),
    "diagonal": _masked(lambda q, k, n: torch.ones(n, n, dtype=torch.bool).tril(n // 4)),
    "reversed numbers": _masked(lambda q, k, n: torch.arange(n - 1, -1, -1)[None] <= q),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_with_a_number_of_the_length_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported):
        compile_and_run(attend=MASKS[name])


def test_no_memory_for_the_whole_sequence_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty_strided", full)
    with pytest.raises(compared.NotComparable, match="no memory for an input of the whole sequence"):
        compared._longer(torch.ones(2, 4), 1, 2)


# ---- inputs in objects ---------------------------------------------------------------------------------------------------


@dataclass
class Held:
    position_ids: object


@dataclass(frozen=True)
class Frozen:
    position_ids: object


class Slotted:
    __slots__ = ("position_ids",)

    def __init__(self, position_ids: object) -> None:
        self.position_ids = position_ids


class Named(NamedTuple):
    position_ids: object


class Subclass(dict[str, object]):
    """As outputs of transformers: an item is an attribute, too."""

    def __init__(self, position_ids: object) -> None:
        super().__init__(position_ids=position_ids)
        self.position_ids = position_ids


OBJECTS: dict[str, Callable[[object], Any]] = {
    "dataclass": Held,
    "frozen dataclass": Frozen,
    "slots": Slotted,
    "named tuple": Named,
    "subclass of dict": Subclass,
    "namespace": lambda x: SimpleNamespace(position_ids=x),
    "object in an object": lambda x: SimpleNamespace(position_ids=x, inner=Held([x])),
}


def _reported() -> str:
    return " ".join(attn_compiler.reports()[-1].details().split())


@pytest.mark.parametrize("name", OBJECTS)
def test_inputs_in_an_object_are_looked_into(name: str) -> None:
    def of_length(m: Model, x: Tensor, d: Any) -> Tensor:
        return x * (x.shape[1] / 3) + d["held"].position_ids[..., None]

    def of_none(m: Model, x: Tensor, d: Any) -> Tensor:
        return x / 3 + d["held"].position_ids[..., None]

    given: Any = {"held": OBJECTS[name](positions())}
    assert compile_and_run(before=of_none, data=given).shape == (BATCH, LENGTH, WIDTH)
    assert "by their values alone" not in _reported()
    with pytest.raises(ContextParallelUnsupported, match=_NUMBER):
        compile_and_run(before=of_length, data=given)
    assert given["held"].position_ids.shape == (BATCH, LENGTH)


def test_an_object_that_holds_itself_is_no_comparison() -> None:
    held: Any = SimpleNamespace(position_ids=positions())
    held.me = held
    given: Any = {"held": held}

    def before(m: Model, x: Tensor, d: Any) -> Tensor:
        return x + d["held"].position_ids[..., None]

    assert compile_and_run(before=before, data=given).shape == (BATCH, LENGTH, WIDTH)
    assert "a SimpleNamespace that is given holds itself" in _reported()
