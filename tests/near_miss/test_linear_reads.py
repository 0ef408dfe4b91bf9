"""Functions of linear attention that read more than their arguments: whenever that changes, the numbers are the model's own."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_compiler
from attn_compiler.passes.matching.linear import source
from tests.near_miss import linear_variants
from tests.thinned import further

_OPTIONS = {"inner": "eager", "lowering": "linear_reference"}

_HELPERS = """\
SCALE = 1.0
STEPS = (1, 0.5)


class Config:
    scale = 1.0


def scaled(x, by=1.0, *, shift=0.0):
    return x * by * SCALE + shift


def halved(x):
    return x * 0.5


def same(x):
    return x
"""

_MODEL = """\
import math

import torch
import torch.nn.functional as F

import {helpers} as helpers
from {helpers} import same

FACTOR = 1.0
NUMBERS = [1.0]
READS = {{"scale": 1.0}}


def own(x, by=1.0):
    return x * by


def rule(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
    value = {value}
    q, k, v, beta, g = (x.transpose(1, 2) for x in (query, key, value, beta, g))
    q = q * q.shape[-1] ** -0.5
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype) if initial_state is None else initial_state
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None]
        u = (v[:, :, t] - (state * k[:, :, t].unsqueeze(-1)).sum(-2)) * beta[:, :, t].unsqueeze(-1)
        state = state + k[:, :, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((state * q[:, :, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1), state if output_final_state else None
"""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _model(folder: Path, value: str) -> tuple[types.ModuleType, types.ModuleType]:
    """A module with a function, whose values are worked out as `value` says, and the module of its helpers."""
    name = f"reads_{abs(hash((value, str(folder)))):x}"
    helpers = linear_variants.module_of(folder, f"{name}_helpers", _HELPERS)
    return linear_variants.module_of(folder, name, _MODEL.format(value=value, helpers=helpers.__name__)), helpers


def _given(batch: int = 2, length: int = 3) -> list[Tensor]:
    made = torch.Generator().manual_seed(batch + length)
    tokens = (batch, length, 2)
    q, k, v = (torch.randn(*tokens, 4, generator=made) for _ in range(3))
    return [q, k / 3, v, -torch.rand(*tokens, generator=made), torch.rand(*tokens, generator=made)]


def _call(model: types.ModuleType) -> Callable[..., Tensor]:
    return lambda *given: model.rule(*given)[0]  # type: ignore[no-any-return]


def _compiled(model: types.ModuleType) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_call(model), backend="attn_compiler", options=_OPTIONS)
    return compiled


def _taken() -> list[str]:
    return [row.decision.lowering for report in attn_compiler.reports() for row in report.linear]


def _why() -> str:
    return " ".join(str(miss.reason) for report in attn_compiler.reports() for miss in report.misses)


def _hold(compiled: Callable[..., Tensor], model: types.ModuleType) -> None:
    given = _given()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), _call(model)(*given), rtol=1e-4, atol=1e-5)


#: what a function reads -> how it is changed. Each is followed: the function is taken, and compiled anew.
_FOLLOWED: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "a number of its module": ("value * FACTOR", lambda m, h: setattr(m, "FACTOR", 3.0)),
    "a number of another module": ("value * helpers.SCALE", lambda m, h: setattr(h, "SCALE", 3.0)),
    "a pair of another module": ("value * helpers.STEPS[0]", lambda m, h: setattr(h, "STEPS", (3, 1))),
    "a number of a number's type": ("value * FACTOR", lambda m, h: setattr(m, "FACTOR", True)),
    "a function of its module": ("own(value)", lambda m, h: setattr(m, "own", h.halved)),
    "a function of another module": ("helpers.same(value)", lambda m, h: setattr(h, "same", h.halved)),
    "a function under its own name": ("same(value)", lambda m, h: setattr(m, "same", h.halved)),
    "what a function reads": ("helpers.scaled(value)", lambda m, h: setattr(h, "SCALE", 3.0)),
    "a default": ("own(value)", lambda m, h: setattr(m.own, "__defaults__", (3.0,))),
    "a default by name": ("helpers.scaled(value)", lambda m, h: h.scaled.__kwdefaults__.update(shift=3.0)),
    "defaults by name": ("helpers.scaled(value)", lambda m, h: setattr(h.scaled, "__kwdefaults__", {"shift": 3.0})),
    "code": ("own(value)", lambda m, h: setattr(m.own, "__code__", (lambda x, by=1.0: x * 3).__code__)),
    "its own code": ("value", lambda m, h: setattr(m.rule, "__code__", _other(m).__code__)),
    "a module": ("helpers.same(value)", lambda m, h: setattr(m, "helpers", types.SimpleNamespace(same=h.halved))),
    "a function of PyTorch": ("torch.clone(value)", lambda m, h: setattr(m, "torch", _patched_torch())),
}


def _other(model: types.ModuleType) -> types.FunctionType:
    made: dict[str, Any] = {"torch": torch}
    text = Path(str(model.__file__)).read_text()
    exec(text[text.index("def rule") :].replace("    value = value", "    value = value * 3"), made)
    found = made["rule"]
    assert isinstance(found, types.FunctionType)
    return found


def _patched_torch() -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**vars(torch), "clone": lambda x: x * 3})


@pytest.mark.parametrize("name", _FOLLOWED)
def test_what_is_read_may_change_at_any_time(tmp_path: Path, name: str) -> None:
    value, change = _FOLLOWED[name]
    model, helpers = _model(tmp_path, value)
    compiled = _compiled(model)
    _hold(compiled, model)
    assert _taken() == ["linear_reference"]
    before = _call(model)(*_given())
    change(model, helpers)
    is_another = not torch.allclose(before, _call(model)(*_given()))
    _hold(compiled, model)
    assert len(_taken()) == (1 if is_another else 2)
    torch._dynamo.reset()
    _hold(_compiled(model), model)


#: what chooses by more than sizes and numbers, or can't be followed -> what the refusal names
_REFUSED = {
    "value * (2.0, 1.0)[value.requires_grad]": "value.requires_grad",
    "value * (2.0, 1.0)[value.is_contiguous()]": "value.is_contiguous",
    "value * (1 + 64 * torch.finfo(value.dtype).eps)": "torch.finfo",
    "value * (1.0 + torch.get_default_dtype().itemsize - 4)": "torch.get_default_dtype",
    "value * value.element_size() / 4": "value.element_size",
    "value * value.stride(-1)": "value.stride",
    "value * (1.0, 2.0)[value.is_leaf]": "value.is_leaf",
    "value * (1.0, 2.0)[value.grad is None]": "value.grad",
    "value * (1.0, 2.0)[torch.is_grad_enabled()]": "torch.is_grad_enabled",
    "value * (1.0, 2.0)[value.device.index or 0]": "value.device.index",
    "value * {torch.float32: 1.0, torch.bfloat16: 2.0}[value.dtype]": "dict",
    "value * (1 + (value.data_ptr() % 16))": "value.data_ptr",
    "value * helpers.Config.scale": "helpers.Config.scale",
    "value * NUMBERS[0]": "NUMBERS",
    "value * READS['scale']": "READS",
    "value * float(helpers.__dict__['SCALE'])": "helpers.__dict__",
    "value * getattr(helpers, 'SCALE')": "getattr",
    "value * globals()['FACTOR']": "globals",
    "(lambda x: x * FACTOR)(value)": "lambda x",
    "value * vars(helpers)['SCALE']": "helpers",
    "value * math.nan_scale": "math.nan_scale",
    "value * torch.tensor(NUMBERS)": "NUMBERS",
    "value * torch.initial_seed()": "torch.initial_seed",
    "value * (1 + torch.get_num_threads() // 1000)": "torch.get_num_threads",
    "value + (value / 100).to(torch.int64)": "_to_copy makes int64",
    "value * 2.0 ** (value.shape[0] * value.shape[1] // 512)": "computes with",
    "value * (1 + value.shape[0] * value.shape[2] // 256)": "computes with",
    "sum([value] + [value for _ in range(value.shape[0] // 64)])": "takes other steps",
    "value + sum([value * 5.0 for _ in range(value.shape[0] // 64)])": "computes with",
}


@pytest.mark.parametrize("value", _REFUSED)
def test_what_chooses_by_more_than_its_arguments_is_refused_by_name(tmp_path: Path, value: str) -> None:
    """At 192 rows, where those that choose by sizes do: the small runs of a proof have one row, and six."""
    model, _ = _model(tmp_path, value)
    compiled = _compiled(model)
    for given in (_given(), _given(192)):
        with torch.no_grad():
            try:
                wanted = _call(model)(*given)
            except AttributeError:
                break
            torch.testing.assert_close(compiled(*given), wanted, rtol=1e-4, atol=1e-5)
    assert _REFUSED[value] in (source.read(model.rule).why_not or _why())


def _edits(draw: random.Random, model: Any, helpers: Any) -> Iterator[Callable[[], None]]:
    """Changes of all that the function of the test below reads, back and forth."""
    number = draw.choice((1.0, 1.0, 1.0, 2.0, 3, True))
    function = draw.choice((helpers.same, helpers.halved, helpers.scaled, lambda x: x * 2))
    yield lambda: setattr(model, "FACTOR", number)
    yield lambda: setattr(helpers, "SCALE", number)
    yield lambda: setattr(helpers, "same", function)
    yield lambda: setattr(model, "own", function)
    yield lambda: setattr(helpers.scaled, "__defaults__", (number,))
    yield lambda: helpers.scaled.__kwdefaults__.update(shift=number - 1)
    yield lambda: setattr(model, "helpers", draw.choice((helpers, types.SimpleNamespace(**vars(helpers)))))
    yield torch._dynamo.reset


def _edited_at_random(folder: Path, seed: int) -> int:
    """How many of the calls were taken."""
    draw = random.Random(seed)
    model, helpers = _model(folder, "own(helpers.scaled(helpers.same(value * FACTOR)))")
    compiled, taken = _compiled(model), 0
    for _ in range(12):
        attn_compiler.reset()
        _hold(compiled, model)
        taken += bool(_taken())
        draw.choice(list(_edits(draw, model, helpers)))()
    return taken


@pytest.mark.parametrize("seed", further(range(8), daily=(0, 1)))
def test_edits_at_random_moments(tmp_path: Path, seed: int) -> None:
    assert _edited_at_random(tmp_path, seed)


def test_another_process_proves_what_it_reads_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is kept on disk by all that it rests on. Python imports a changed file as another process would."""
    from attn_compiler.passes.matching.linear import proving

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    model, helpers = _model(tmp_path, "helpers.scaled(value)")
    path = Path(str(helpers.__file__))
    for text, is_taken in ((_HELPERS, True), (_HELPERS.replace("SCALE = 1.0", "SCALE = 3.0"), False), (_HELPERS, True)):
        monkeypatch.setattr(proving, "_PROVED", {})
        path.write_text(text)
        importlib.invalidate_caches()
        exec(compile(textwrap.dedent(text), str(path), "exec"), vars(helpers))
        torch._dynamo.reset()
        attn_compiler.reset()
        _hold(_compiled(model), model)
        assert bool(_taken()) is is_taken
