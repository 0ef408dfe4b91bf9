"""`aot_compile` and PyTorch's precompilation: what one process saved, another one loads, and runs no pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fresh

_MODEL = """
import sys, torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.register_buffer("tril", torch.ones(16, 16, dtype=torch.bool).tril())
    def forward(self, x, keys):
        q, k, v = self.qkv(x).view(2, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        at = torch.arange(x.shape[1])
        made = (at <= at[:, None]) & keys[:, None, None]
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=made)
        return F.scaled_dot_product_attention(first, k, v, attn_mask=self.tril), keys & True

torch.manual_seed(0)
model, x, keys, training = Model(), torch.randn(2, 16, 32), torch.ones(2, 16, dtype=torch.bool), sys.argv[2] == "training"
keys[0, 12:] = False
"""
_SAVE = """
import attn_compiler
options = None if sys.argv[3] == "None" else {"lowering": sys.argv[3]}
with torch.set_grad_enabled(training):
    run = torch.compile(model, backend="attn_compiler", fullgraph=True, options=options).forward.aot_compile(((x, keys), {}))
    torch.testing.assert_close(run(model, x, keys), model(x, keys))
run.save_compiled_function(sys.argv[1])
(report,) = attn_compiler.reports()
print([site.decision.lowering for site in report.sites], report)
"""
_LOAD = """
model.tril.fill_(True)  # what this process holds counts, and not what the other one held
with open(sys.argv[1], "rb") as file:
    run = torch.compiler.load_compiled_function(file)
with torch.set_grad_enabled(training):
    outs = []
    for call in (lambda: run(model, x, keys), lambda: model(x, keys)):
        out, given = call()
        if training:
            model.zero_grad()
            out.square().sum().backward()
        outs.append((out.detach(), given, model.qkv.weight.grad))
torch.testing.assert_close(*outs)
print(sorted(name for name in sys.modules if name.startswith("attn_compiler.passes")))
"""


_PRECOMPILED = """
torch._dynamo.config.caching_precompile = True
if sys.argv[4] == "load":
    torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
    model.tril.fill_(True)
run = torch.compile(model, backend="attn_compiler", fullgraph=True, options=None if sys.argv[3] == "None" else {"lowering": sys.argv[3]})
with torch.set_grad_enabled(training):
    outs = []
    for called in (run, model):
        out, given = called(x, keys)
        if training:
            model.zero_grad()
            out.square().sum().backward()
        outs.append((out.detach(), given, model.qkv.weight.grad))
torch.testing.assert_close(*outs)
if sys.argv[4] == "save":
    open(sys.argv[1], "wb").write(torch.compiler.save_cache_artifacts()[0])
print(sorted(name for name in sys.modules if name.startswith("attn_compiler.passes")))
"""


@pytest.mark.parametrize("lowering", ["None", "rows"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_what_was_precompiled_is_loaded_without_a_pass(mode: str, lowering: str, tmp_path: Path) -> None:
    said = [
        fresh.run(
            _MODEL + _PRECOMPILED,
            *(str(tmp_path / "saved"), mode, lowering, step),
            environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / step)},
        ).stdout.splitlines()[-1]
        for step in ("save", "load")
    ]
    assert "attn_compiler.passes.matching.match" in said[0]
    assert said[1] == "[]"


@pytest.mark.parametrize("lowering", ["None", "rows"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_what_was_compiled_ahead_of_time_is_loaded_without_a_pass(mode: str, lowering: str, tmp_path: Path) -> None:
    saved = fresh.run(_MODEL + _SAVE, str(tmp_path / "saved"), mode, lowering)
    assert (lowering in saved.stdout) == (lowering != "None")
    loaded = fresh.run(_MODEL + _LOAD, str(tmp_path / "saved"), mode)
    assert loaded.stdout.strip() == "[]"
