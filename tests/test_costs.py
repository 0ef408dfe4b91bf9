"""What every user waits for, as numbers of function calls: the same on a busy machine, and on a slow one. Bounds may only shrink.

Calls are Python's and C's, as cProfile counts them, in processes of their own. CPU seconds beside them: docs/measuring.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import fresh
from tests.thinned import further

_COUNTING = """
import cProfile, json, sys, torch

def calls(function, *args, **named):
    profile = cProfile.Profile()
    profile.enable()
    try:
        return function(*args, **named)
    finally:
        profile.disable()
        counted.append(sum(one.callcount for one in profile.getstats()))

counted = []
"""
_IMPORT = """
import importlib
calls(importlib.import_module, "attn_compiler.compiling.backend")
"""
_DIGEST = """
from attn_compiler.options import cache
calls(cache.sources_digest)
"""
_LOOK = """
import torch._dynamo
from transformers.models.qwen3_next import modeling_qwen3_next
from attn_compiler.passes.matching.linear import looking
found = calls(lambda: list(looking.new_functions()))
assert {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"} <= {one.__name__ for one in found}
"""
_LINEAR = """
import attn_compiler.compiling.backend
def first(backend, size):
    with torch.no_grad():
        return torch.compile(torch.nn.Linear(size, size), backend=backend)(torch.ones(1, size))
first("inductor", 3)  # what Inductor itself imports
calls(first, "inductor", 4)
calls(first, "attn_compiler", 5)
counted[:] = [counted[1] - counted[0]]
"""
_PASSES = """
import transformers
from attn_compiler.compiling import backend

run, layers, cached = backend._compile_with, int(sys.argv[1]), len(sys.argv) > 2
backend._compile_with = lambda *args, **named: calls(run, *args, **named)
sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
model = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)).eval()
options = {"inner": "eager", "cache_rewrites": cached}
ids, mask = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
mask[0, 12:] = 0
with torch.no_grad():
    torch.compile(model, backend="attn_compiler", options=options)(input_ids=ids, attention_mask=mask)
"""


def _counted(code: str, *arguments: str, of: str = "torch", cache: Path | None = None) -> int:
    environment = {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    code = f"{_COUNTING}{code}\nprint(json.dumps(counted))"
    found: list[int] = json.loads(fresh.run(code, *arguments, of=of, environment=environment).stdout.splitlines()[-1])
    return sum(found)


def _within(counted: int, bound: int) -> bool:
    """Return whether a number keeps to a bound that is near it: one far above says nothing."""
    return 0.7 * bound <= counted <= bound


def test_importing_the_backend() -> None:
    assert _within(_counted(_IMPORT), 60_000)


def test_the_digest_of_sources() -> None:
    assert _within(_counted(_DIGEST), 7_500)


def test_the_look_for_linear_attention() -> None:
    pytest.importorskip("transformers")
    assert _within(_counted(_LOOK, of=fresh.MODELS), 46_000)


def test_the_first_call_of_a_graph_without_attention(tmp_path: Path) -> None:
    """Beside Inductor's own first call."""
    assert _within(_counted(_LINEAR, cache=tmp_path), 108_000)


#: by number of layers
_OF_PASSES = {2: 510_000, 8: 960_000, 32: 2_750_000, 80: 6_300_000}


@pytest.mark.parametrize("layers", further(_OF_PASSES, daily=(2,)))
def test_the_passes_of_a_decoder(layers: int) -> None:
    pytest.importorskip("transformers")
    assert _within(_counted(_PASSES, str(layers), of=fresh.MODELS), _OF_PASSES[layers])


def test_the_passes_of_a_second_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = (_counted(_PASSES, "8", "cached", of=fresh.MODELS, cache=tmp_path) for _ in range(2))
    assert second < first / 2
    assert _within(second, 225_000)
