"""A second process with the caches of the first: no pass of ours runs, nothing is compiled again, and numbers and report are the same.

Where nothing is said, Inductor compiles. Processes are forks (tests/fresh.py). The second is a fork of another server: its sets have other
orders, and its objects other addresses.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import fresh

SCRIPT = """
import json, sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

given = json.loads(sys.argv[1])
if given.get("load"):
    # Before this package is imported, as a launcher would.
    with open(given["load"], "rb") as file:
        assert torch.compiler.load_cache_artifacts(file.read()) is not None

import attn_compiler
from tests.attention_layer import Attention
from tests.passes.rewrites.watching import watched, without_times

torch.manual_seed(0)
layers = nn.ModuleList(Attention(2, 8) for _ in range(2))

def model(x):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if given.get("checkpoint") else layer(x)
    return x

if given.get("regional"):
    for layer in layers:
        layer.compile(backend="attn_compiler", options=given.get("options"))
    run = model
else:
    run = torch.compile(model, backend="attn_compiler", dynamic=given.get("dynamic"), options=given.get("options"))
with watched() as seen:
    out = run(torch.arange(16.0 * given.get("length", 8)).view(1, -1, 16).sin().requires_grad_())
    out.square().sum().backward()
counters = torch._dynamo.utils.counters
if given.get("save"):
    artifacts, _ = torch.compiler.save_cache_artifacts()
    with open(given["save"], "wb") as file:
        file.write(artifacts)
print(json.dumps({
    "out": out.detach().flatten().tolist(),
    "gradient": [p.grad.double().sum().item() for p in layers.parameters()],
    "ran": [list(one.ran) for one in seen],
    "from cache": [one.report.from_cache for one in seen],
    "not kept": [one.report.not_kept for one in seen],
    "report": [without_times(one.report) for one in seen],
    "code": [one.code for one in seen],
    "counted": counters["attn_compiler"].get("from_cache", 0),
    "hits": counters["aot_autograd"].get("autograd_cache_hit", 0),
    "misses": counters["aot_autograd"].get("autograd_cache_miss", 0),
}))
"""


def _started(folder: Path, start: Callable[..., fresh.Done[str]] = fresh.run, **given: Any) -> dict[str, Any]:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "ATTN_COMPILER_CACHE_REWRITES": "1"}
    answer: dict[str, Any] = json.loads(start(SCRIPT, json.dumps(given), environment=environment).stdout)
    return answer


#: a process with other hashes and addresses than `fresh.run`'s
ANOTHER = functools.partial(fresh.run, of="another torch")


#: without Inductor, whose C++ takes ten times as long
QUICK = {"inner": "aot_eager"}


def _hold(first: dict[str, Any], second: dict[str, Any], *, hits: int = 1) -> None:
    """The second process found everything, and came to the same. hits: of Inductor's caches."""
    assert (first["from cache"], first["not kept"]) == ([False], [None])
    assert (second["from cache"], second["ran"], second["counted"]) == ([True], [[]], 1)
    assert (first["hits"], second["hits"], second["misses"]) == (0, hits, 0)
    for what in ("out", "gradient", "report", "code"):
        assert second[what] == first[what], what


def test_a_second_process_finds_everything(tmp_path: Path) -> None:
    first = _started(tmp_path)
    _hold(first, _started(tmp_path, ANOTHER))
    assert first["report"][0]["num_sites"] == 2


_IMPORTED = """
import json, sys, torch
from torch.nn import functional

def model(q):
    return functional.scaled_dot_product_attention(q, q, q)

options = {"inner": "aot_eager", "lowerings": sys.argv[1:]}
torch.compile(model, backend="attn_compiler", options=options)(torch.ones(1, 2, 8, 16, requires_grad=True)).sum().backward()
print(json.dumps([name.removeprefix("attn_compiler.") for name in sys.modules]))
"""


@pytest.mark.parametrize("lowering", ["sdpa_cpu_flash", "triton"])
def test_a_second_process_imports_no_passes_and_one_family(lowering: str, tmp_path: Path) -> None:
    """They are half of what a start would import. No process imports the rooms of options that are not asked for."""
    given = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATTN_COMPILER_CACHE_REWRITES": "1"}
    first, second = (set(json.loads(ANOTHER(_IMPORTED, lowering, environment=given).stdout)) for _ in range(2))
    unwanted = {"passes.matching.match", "passes.recovering.recover", "passes.matching.patterns", "passes.writing"}
    assert unwanted <= first
    assert not [name for name in first if name.startswith(("passes.context_parallel", "passes.unpad"))]
    assert "passes" in second
    assert not (unwanted | {"verifying.first", "reporting.render", "rich"}) & second
    rooms = {name.split(".")[1] for name in second if name.startswith("lowerings.")}
    assert rooms - {"base", "homes", "shared", "graph_ops"} == {lowering.split("_")[0]}


@pytest.mark.further
def test_checkpoints_of_a_second_process(tmp_path: Path) -> None:
    first = _started(tmp_path, checkpoint=True, options=QUICK)
    _hold(first, _started(tmp_path, ANOTHER, checkpoint=True, options=QUICK), hits=0)


@pytest.mark.further
def test_a_second_process_finds_symbolic_sizes_of_another_length(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dynamic": True, "options": QUICK}
    first, alone = _started(tmp_path, **given), _started(tmp_path / "alone", **given, length=21)
    second = _started(tmp_path, ANOTHER, **given, length=21)
    assert (first["from cache"], first["not kept"]) == ([False], [None])
    assert (second["from cache"], second["ran"], second["counted"]) == ([True], [[]], 1)
    for what in ("out", "gradient", "report", "code"):
        assert second[what] == alone[what], what


@pytest.mark.slow
def test_checks_want_the_passes_and_nothing_of_inductor(tmp_path: Path) -> None:
    _started(tmp_path)
    for options in ({"strict": True}, {"verify": True}):
        found = _started(tmp_path, options=options)
        assert (found["hits"], found["misses"]) == (1, 0), options
        assert found["ran"] != [[]]
    again = _started(tmp_path, options={"strict": True, "check_invariants": False})
    assert (again["ran"], again["hits"], again["misses"]) == ([[]], 1, 0)


def test_one_layer_that_is_compiled_serves_all(tmp_path: Path) -> None:
    first = _started(tmp_path, regional=True, options=QUICK)
    _hold(first, _started(tmp_path, ANOTHER, regional=True, options=QUICK), hits=0)


def test_saved_artifacts_bring_it_to_another_machine(tmp_path: Path) -> None:
    saved = str(tmp_path / "artifacts")
    first = _started(tmp_path / "one", save=saved, options=QUICK)
    second = _started(tmp_path / "two", ANOTHER, load=saved, save=f"{saved} again", options=QUICK)
    _hold(first, second, hits=0)
    # What was only found is saved, too.
    _hold(first, _started(tmp_path / "three", load=f"{saved} again", options=QUICK), hits=0)


@pytest.mark.slow
def test_saved_artifacts_bring_inductors_code_too(tmp_path: Path) -> None:
    saved = str(tmp_path / "artifacts")
    first = _started(tmp_path / "one", fresh.run_anew, save=saved)
    _hold(first, _started(tmp_path / "two", fresh.run_anew, load=saved))


@pytest.mark.further
def test_ranks_that_start_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda start: _started(tmp_path, start, options=QUICK), (fresh.run, ANOTHER))
    third = _started(tmp_path, options=QUICK)
    assert third["ran"] == [[]]
    assert one["out"] == two["out"] == third["out"]


_LINEAR = """
import json, sys, torch
import attn_compiler
from tests.passes.matching.linear import linear_functions
from tests.passes.rewrites.watching import watched, without_times

torch.manual_seed(0)
given = {name: torch.rand(2, 6, 2, 4).requires_grad_() for name in ("query", "key", "value")}
given |= {name: torch.rand(2, 6, 2).neg().requires_grad_() for name in ("g", "beta")}

def model(**given):
    return linear_functions.by_token(**given)[0]

options = {"inner": "aot_eager", "lowering": sys.argv[1]}
run = torch.compile(model, backend="attn_compiler", options=options)
with watched() as seen:
    out = run(**given)
    out.square().sum().backward()
(one,) = seen
print(json.dumps({
    "out": out.detach().flatten().tolist(),
    "gradient": [x.grad.double().sum().item() for x in given.values()],
    "ran": list(one.ran),
    "from cache": one.report.from_cache,
    "not kept": one.report.not_kept,
    "linear": one.report.num_linear,
    "report": without_times(one.report),
    "code": one.code,
}))
"""


@pytest.mark.parametrize("lowering", ["linear_reference", "linear_triton"])
def test_a_second_process_finds_linear_attention(tmp_path: Path, lowering: str) -> None:
    """The graph has no attention besides. Its function is proved once."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATTN_COMPILER_CACHE_REWRITES": "1"}
    first, second = (
        json.loads(start(_LINEAR, lowering, environment=environment).stdout) for start in (fresh.run, ANOTHER)
    )
    assert (first["from cache"], first["not kept"], first["linear"]) == (False, None, 1)
    assert (second["from cache"], second["ran"], second["linear"]) == (True, [], 1)
    for what in ("out", "gradient", "report", "code"):
        assert second[what] == first[what], what
