"""The ways in which families of linear attention are run, and how far what is compiled is from eager in each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import attn_compiler
from attn_compiler.compiling import linear_attention
from attn_compiler.passes.matching.linear import proving, source
from attn_compiler.reasons.codes import Code
from tests.hf.linear_families import VOCAB, LinearFamily
from tests.hf.packages import import_package
from tests.hf.survey import Recorder

OPTIONS = {"inner": "eager", "strict": True, "lowering": "linear_reference"}
BATCH, LENGTH, PADDED, STEPS = 2, 70, 13, 3
LENGTHS = (40, 70, 130)
#: how far a number may be beside the largest of its tensor
NEAR: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4}
#: beyond that, how far from float64 beside eager in float32: where a model makes much of roundings
_FACTOR = 2.0

Exact = Callable[[], Any]


@dataclass(kw_only=True)
class Shown:
    """What one run gave.

    found: how often our lowering computed a layer. wanted: how often it should, over all forwards. misses: how often one was told as a
    miss. told: how often that is so by design.
    outputs, gradients, states: the largest difference from eager, beside the largest number of a tensor. ratios: of gradients that
    are beyond NEAR, the distance from float64 beside that of eager.
    same: whether tokens, or the names of parameters that have a gradient, are the same.
    """

    found: int = 0
    wanted: int = 0
    misses: int = 0
    told: int = 0
    outputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    states: list[float] = field(default_factory=list)
    same: bool = True

    def is_right(self, dtype: torch.dtype) -> bool:
        """Whether all layers were found, and all numbers are those of eager."""
        is_near = all(x <= NEAR[dtype] for x in (*self.outputs, *self.states))
        num_beyond = sum(not x <= NEAR[dtype] for x in self.gradients)
        are_as_good = len(self.ratios) == num_beyond and all(x <= _FACTOR for x in self.ratios)
        return self.same and is_near and are_as_good and self.found == self.wanted > 0 and self.misses == self.told

    @property
    def farthest(self) -> float:
        """The largest difference of all."""
        return max((*self.outputs, *self.gradients, *self.states))


class Run:
    """A compiled model, and how many tokens each call had, and how often each of its graphs ran."""

    def __init__(self, forward: Callable[..., Any], **how: Any) -> None:
        torch._dynamo.reset()
        attn_compiler.reset()
        # `generate` reads what a forward takes.
        self.__signature__ = inspect.signature(forward)
        self.tokens: list[int] = []
        self._recorder = Recorder(OPTIONS)
        linear_attention.watch(self._recorder)
        self._compiled = torch.compile(forward, backend=self._recorder, **how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        self.tokens.append(ids.shape[1])
        # A model with breaks in each layer has more graphs of one function than Dynamo makes by default.
        with torch._dynamo.config.patch(recompile_limit=64):
            return self._compiled(*args, **kwargs)

    def count(self, family: LinearFamily, shown: Shown) -> Shown:
        """Read what was found into `shown`."""
        for report, runs in zip(self._recorder.reports, self._recorder.runs, strict=True):
            shown.found += report.num_linear * runs
            shown.misses += runs * sum(len(miss.modules) for miss in report.misses if miss.reason.code in _LINEAR)
        kept = sum(tokens == 1 for tokens in self.tokens) if family.has_gated_steps else 0
        shown.wanted = family.linear * (len(self.tokens) - kept)
        shown.told = family.linear * kept
        return shown


_LINEAR = (Code.LINEAR_ATTENTION, Code.LINEAR_NOT_PROVED, Code.OWN_IS_FASTEST)


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def _mask(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :PADDED] = 0
    elif side == "right":
        mask[1, -PADDED:] = 0
    return mask


def _far(found: Tensor, wanted: Tensor) -> float:
    off = (found - wanted).detach().abs().nan_to_num(torch.inf).max()
    return float(off) / (float(wanted.detach().abs().max()) or 1.0)


def prefill(family: LinearFamily, model: Any) -> Shown:
    """A prompt without a cache."""
    shown, run, ids = Shown(), Run(model, dynamic=False, fullgraph=family.whole), _ids()
    with torch.no_grad():
        shown.outputs.append(_far(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits))
    return run.count(family, shown)


def training(family: LinearFamily, model: Any, side: str, exact: Exact) -> Shown:
    """A training step. side: of padding, or "none". exact: makes the same model in float64."""
    shown = Shown()
    run = Run(model.train(), dynamic=False, fullgraph=family.whole)
    wanted, gradients = _step(model, model, side)
    found, others = _step(model, run, side)
    shown.outputs.append(_far(found, wanted))
    shown.same = gradients.keys() == others.keys()
    far = {name: _far(others[name], x) for name, x in gradients.items()}
    shown.gradients += far.values()
    beyond = [name for name, x in far.items() if not x <= NEAR[wanted.dtype]]
    if beyond and wanted.dtype == torch.float32:
        double = exact().train()
        _, best = _step(double, double, side)
        shown.ratios += [_far(others[name], best[name]) / _far(gradients[name], best[name]) for name in beyond]
    return run.count(family, shown)


def _step(model: Any, run: Callable[..., Any], side: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs at real tokens, and all gradients."""
    mask = _mask(side)
    noise = torch.randn(BATCH, LENGTH, VOCAB, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    model.zero_grad()
    out = run(_ids(), attention_mask=mask, use_cache=False).logits
    (out * noise).sum().backward()
    return out.detach()[mask.bool()], {
        name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None
    }


def decode(family: LinearFamily, model: Any) -> Shown:
    """A padded prompt with a cache, tokens one by one, and several tokens at once after them."""
    shown, run = Shown(), Run(model, dynamic=False)
    with torch.no_grad():
        wanted, found = _decoded(model, model), _decoded(model, run)
    shown.outputs.append(_far(found[0], wanted[0]))
    shown.same = len(found[1]) == len(wanted[1]) >= 2 * family.linear
    shown.states += [_far(x, y) for x, y in zip(found[1], wanted[1], strict=True)]
    return run.count(family, shown)


def _decoded(model: Any, run: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
    cache = import_package("transformers").DynamicCache(config=model.config)
    # The older name of the same.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    given, mask, outs = _ids(), _mask("left"), []
    for step in range(STEPS + 1):
        out = run(given, attention_mask=mask, use_cache=True, **{named: cache})
        outs.append(out.logits[:, -1])
        given = _ids()[:, step : step + (1 if step + 1 < STEPS else 7)]
        mask = torch.cat([mask, mask.new_ones(BATCH, given.shape[1])], 1)
    return torch.stack(outs), list(_states(cache))


def _states(cache: Any) -> Iterator[Tensor]:
    for layer in cache.layers:
        for name in ("recurrent_states", "conv_states"):
            held = getattr(layer, name, None)
            yield from (x for x in (held.values() if isinstance(held, dict) else held or ()) if x is not None)


def generate(family: LinearFamily, model: Any) -> Shown:
    """Tokens of a padded prompt, without sampling."""
    shown, ids = Shown(), _ids()
    given = {"attention_mask": _mask("left"), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    more = {"output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(ids, **given, **more)
    own = model.forward
    model.forward = run = Run(own, dynamic=False)
    try:
        found = model.generate(ids, **given, **more)
    finally:
        model.forward = own
    shown.same = found.sequences.tolist() == wanted.sequences.tolist()
    shown.outputs += [_far(x, y) for x, y in zip(found.logits, wanted.logits, strict=True)]
    return run.count(family, shown)


def lengths(family: LinearFamily, model: Any) -> Shown:
    """One graph for several lengths. With float64, the same text but for the word is among those that were read."""
    shown, run = Shown(), Run(model, dynamic=True, fullgraph=family.whole)
    with mock.patch.dict(proving.READ, _as_read(model)), torch.no_grad():
        for length in LENGTHS:
            ids = _ids(length)
            shown.outputs.append(_far(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits))
    return run.count(family, shown)


def _as_read(model: Any) -> dict[str, str]:
    """Of a model in float64, the digests of texts that a person has read in float32."""
    wide = sys.modules[type(model).__module__]
    own = sys.modules[wide.__name__.removesuffix("_wide")]
    read = [name for name, value in vars(own).items() if _digest(value) in proving.READ]
    return {_digest(vars(wide)[name]): "in float64" for name in read}


def _digest(value: Any) -> str:
    """Of a function's text; "" of anything else."""
    function = inspect.unwrap(value) if inspect.isfunction(value) else None
    return "" if function is None else source.read(function).digest


SCENARIOS: Mapping[str, Callable[[LinearFamily, Any, Exact], Shown]] = {
    "prefill": lambda family, model, _: prefill(family, model),
    "training": lambda family, model, exact: training(family, model, "none", exact),
    "padded left": lambda family, model, exact: training(family, model, "left", exact),
    "padded right": lambda family, model, exact: training(family, model, "right", exact),
    "decode": lambda family, model, _: decode(family, model),
    "generate": lambda family, model, _: generate(family, model),
    "lengths": lambda family, model, _: lengths(family, model),
}


def show(family: LinearFamily, scenario: str, dtype: torch.dtype, folder: Path) -> Shown:
    """Build the model and run it. folder: for files of models in float64."""
    return SCENARIOS[scenario](family, family.build(dtype, folder), lambda: family.build(torch.float64, folder))
