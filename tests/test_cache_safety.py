"""No compiled artifact outlives what it was compiled from: the hazard, reproduced in two processes, and what prevents it.

A custom op's backward factor is 2 in one "release" and 3 in the next. The graph is the same in both, so PyTorch's caches
take the second for the first. Nothing here needs generated C++, which keeps it fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fresh

FIRST_RELEASE = ("2.0", "0.1.0")  # the backward's factor, the package's version
NEXT_RELEASE = ("3.0", "0.2.0")

SCRIPT = """
import json, sys, torch
from attn_compiler import passes
import attn_compiler.lowerings.homes as homes
from attn_compiler.reporting import publishing
from attn_compiler.options import cache
from attn_compiler.reporting.report import Report

factor, version, earlier_version = float(sys.argv[1]), sys.argv[2], sys.argv[3]
passes.run_pipeline = lambda gm, options: Report(graph="", target="")
publishing.publish = lambda report, options: None
cache.package_version = lambda: version
cache.sources_digest = lambda: "the same"  # the version alone has to be enough
homes.CLASSES = {"sdpa": ""}

library = torch.library.Library("cache_safety", "FRAGMENT")
library.define("identity(Tensor x) -> Tensor")
library.define("times(Tensor x, float factor) -> Tensor")
library.impl("identity", lambda x: x.clone(), "CPU")
library.impl("times", lambda x, factor: x * factor, "CPU")
torch.library.register_fake("cache_safety::identity", torch.empty_like)
torch.library.register_fake("cache_safety::times", lambda x, factor: torch.empty_like(x))
torch.library.register_autograd("cache_safety::identity", lambda ctx, grad: torch.ops.cache_safety.times(grad, factor))

def gradient_and_counts(backend, **options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.ones(2, 2, requires_grad=True)
    out = torch.compile(torch.ops.cache_safety.identity, backend=backend, options=options)(x)
    out.backward(torch.ones_like(out))
    counts = {**torch._dynamo.utils.counters["aot_autograd"], **torch._dynamo.utils.counters["inductor"]}
    names = ("autograd_cache_hit", "autograd_cache_miss", "fxgraph_cache_miss")
    return {"gradient": x.grad[0, 0].item(), **{name: counts.get(name, 0) for name in names}}

answers = {
    "inductor": gradient_and_counts("inductor"),
    "ours": gradient_and_counts("attn_compiler"),
    "ours again": gradient_and_counts("attn_compiler"),
    "ours, dumped": gradient_and_counts("attn_compiler", dump_dir="unused"),
    "ours, other options": gradient_and_counts("attn_compiler", lowerings=["sdpa"]),
}
cache.package_version = lambda: earlier_version
answers["ours, version unchanged"] = gradient_and_counts("attn_compiler")
print(json.dumps(answers))
"""


def _run(release: tuple[str, str], cache_dir: Path) -> dict[str, dict[str, Any]]:
    run = fresh.run(SCRIPT, *release, FIRST_RELEASE[1], environment={"TORCHINDUCTOR_CACHE_DIR": str(cache_dir)})
    answer: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return answer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """The first release on an empty cache; then, in a new process on the same cache, the next one."""
    cache_dir = tmp_path_factory.mktemp("inductor_cache")
    return _run(FIRST_RELEASE, cache_dir), _run(NEXT_RELEASE, cache_dir)


def _is_hit(run: dict[str, Any]) -> bool:
    assert run["autograd_cache_hit"] + run["autograd_cache_miss"] == 1, run
    return bool(run["autograd_cache_hit"])


@pytest.mark.further
def test_hazard_is_real(runs: tuple[dict[str, Any], ...]) -> None:
    """Inductor alone: the next release gets the backward of the first one. If this fails, PyTorch has closed the hazard."""
    first, following = runs
    assert (first["inductor"]["gradient"], _is_hit(first["inductor"])) == (2.0, False)
    assert (following["inductor"]["gradient"], _is_hit(following["inductor"])) == (2.0, True)


def test_next_release_reuses_nothing(runs: tuple[dict[str, Any], ...]) -> None:
    _, following = runs
    assert following["ours"]["gradient"] == 3.0
    assert not _is_hit(following["ours"])
    assert following["ours"]["fxgraph_cache_miss"] > 0


def test_other_options_reuse_nothing(runs: tuple[dict[str, Any], ...]) -> None:
    first, _ = runs
    assert not _is_hit(first["ours, other options"])
    assert first["ours, other options"]["fxgraph_cache_miss"] > 0
    assert first["ours, other options"]["gradient"] == 2.0


def test_the_same_compilation_is_still_reused(runs: tuple[dict[str, Any], ...]) -> None:
    first, following = runs
    assert not _is_hit(first["ours"])
    assert _is_hit(first["ours again"])
    assert _is_hit(first["ours, dumped"])
    assert following["ours again"]["gradient"] == 3.0


def test_the_version_alone_keeps_the_releases_apart(runs: tuple[dict[str, Any], ...]) -> None:
    """With the version left as it was, the next release hits the first one's artifact, across processes, and is wrong."""
    _, following = runs
    unchanged = following["ours, version unchanged"]
    assert (unchanged["gradient"], _is_hit(unchanged)) == (2.0, True)
