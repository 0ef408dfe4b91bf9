"""Layers that keep a state leave padding out of their projections: their convolution and recurrence read the model's own tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler.passes.unpad import packing
from attn_compiler.reasons.codes import Code
from tests.hf.linear_families import FAMILY, VOCAB
from tests.hf.packages import import_package
from tests.passes.unpad.encoder import LENGTH, MASK, WIDTH, Encoder, check, compiled, mask_of, report
from tests.thinned import further

#: products with weights of each family; 0 where something else keeps padding in
_NAMES = ("qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
PRODUCTS = dict(zip(_NAMES, (26, 32, 38, 23, 19, 19, 11, 18), strict=True)) | {"kimi_linear": 0, "qwen3_5_moe": 0}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each packed graph, products with weights for real tokens alone, and those with padding."""
    found, own = [], packing._work

    def work(maker: Any, sites: Any) -> Any:
        length = str(maker.given.number.meta["example_value"])
        nodes = [x for x in maker.graph.nodes if x.op == "call_function" and "linear" in str(x.target)]
        shapes = [map(str, y.shape) for x in nodes if isinstance(y := x.meta["example_value"], Tensor)]
        packed = [length in shape for shape in shapes]
        found.append((sum(packed), len(packed) - sum(packed)))
        return own(maker, sites)

    monkeypatch.setattr(packing, "_work", work)
    return found


def _built(name: str, folder: Path) -> Any:
    """A model in float64, whose attention stands between layers with a state."""
    family = FAMILY[name]
    if not hasattr(import_package("transformers"), family.model):
        pytest.skip(f"this release of transformers has no {family.model}")
    changed: dict[str, Any] = {"mlp_layer_types": ["dense"] * 4, "mlp_only_layers": [*range(4)]}
    changed |= {"attn_layer_indices": [1], "num_hidden_layers": 4 if family.sites == 1 else 2}
    for kinds in ("layer_types", "layers_block_type"):
        linear, *_, full = family.settings.get(kinds, ["", ""])
        changed[kinds] = [linear, full, linear, linear]
    settings = {**family.settings, **{key: x for key, x in changed.items() if key in family.settings}}
    return dataclasses.replace(family, settings=settings).build(torch.float64, folder)


@pytest.mark.parametrize("name", further(list(PRODUCTS), daily=["qwen3_5", "bamba"]))
def test_projections_are_packed(name: str, tmp_path: Path, products: list[tuple[int, int]]) -> None:
    model = _built(name, tmp_path).train()

    def step(labels: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(**given, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    function = compiled(step)  # type: ignore[arg-type]
    for left in (False, True):
        mask = mask_of(4, 23, 15, left=left, length=23)
        ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(0))
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        both = []
        for run in (function, step):
            logits, loss = run(**given)
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            both.append((logits * mask[..., None], loss, *(torch.zeros(()) if x is None else x for x in grads)))
        for found, wanted in zip(*both, strict=True):
            assert float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max()))
        assert PRODUCTS[name] == 0 or report().last[-1].failed == ()
    assert products == ([(PRODUCTS[name], 0)] if PRODUCTS[name] else []), report().kept


class Mixed(nn.Module):
    """A layer that mixes positions. is_masked: it leaves padding out of it. has_bias: its projection does not give 0 there."""

    def __init__(self, is_masked: bool, has_bias: bool) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=has_bias), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, gate = self.into(x * mask[..., None] if self.is_masked else x).chunk(2, -1)
        y = self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(F.silu(y.cumsum(1)) * gate.sigmoid())


class Hybrid(Encoder):
    """Attentions between two such layers."""

    def __init__(self, *, is_masked: bool = True, has_bias: bool = False) -> None:
        super().__init__()
        self.first, self.last = (Mixed(is_masked, has_bias) for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor, **further: Tensor) -> Tensor:
        x = self.first(self.words(ids) * further.get("factor", 1), mask)
        for layer in self.layers:
            x = layer(x, self.allowed(mask))
        return self.last(x, mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_op_reads_what_is_known_at_padding(has_bias: bool, dynamic: bool, products: list[tuple[int, int]]) -> None:
    model = Hybrid(has_bias=has_bias)
    function = compiled(model, dynamic=dynamic)
    for left in (False, True):
        assert check(model, mask_of(4, 10, 7, left=left), function, close=2e-5).kept is None
    # A projection with a bias is computed with padding.
    assert products == [(6, 2) if has_bias else (8, 0)]
    kept = check(Hybrid(has_bias=has_bias, is_masked=False), close=2e-5).kept
    assert kept is not None
    assert kept.code is Code.MIXES_POSITIONS


def test_padding_is_taken_to_hold_finite_numbers() -> None:
    """A mask's 0 times what is no number is 0 here, and in eager it is none."""
    model, ids = Hybrid(), torch.ones(3, LENGTH, dtype=torch.long)
    factor = torch.where(MASK[..., None] == 0, torch.nan, 1.0)
    with torch.no_grad():
        found = compiled(model)(ids, MASK, factor=factor)
        torch.testing.assert_close(found, model(ids, MASK, factor=factor.nan_to_num(0)) * MASK[..., None])
    assert report().kept is None
