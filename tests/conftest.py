"""What every test shares: one thread, GPU tests are skipped without a GPU, no test sees another's compiled code, and nothing is measured or
written down that no test looks at.

Property tests try the same examples in every run; HYPOTHESIS_PROFILE=explore tries new ones.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Read when torch and the libraries are imported, here and in the processes that tests start. Each worker of -n is a process: one thread
# each is enough, for tensors as for Inductor, which would start a process of its own to start compilers from.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Tests change what no key shows: functions and tables of the package. Those of the cache switch it on.
    "ATTN_COMPILER_CACHE_REWRITES": "0",
}.items():
    os.environ.setdefault(_name, _value)

# What imports make lasts. Python would look through it hundreds of times; Dynamo, after each compilation.
gc.set_threshold(200_000, 10, 20)

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be known before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import quick
from tests.thinned import mark_turns

quick.install(interpreter=True)

# Before any test module is imported: what they decorate takes these over. How long an example took is the machine's matter.
_untimed: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **_untimed)
settings.register_profile("repeat", derandomize=True, database=None, **_untimed)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_configure() -> None:
    """PyTorch's structured trace stays off, as for users. pytest adds its handlers to every logger that does not propagate, and this one
    is on as soon as it has one: then every graph is printed, several times."""
    trace = logging.getLogger("torch.__trace")
    add = trace.addHandler
    trace.addHandler = lambda handler: None if type(handler).__module__.startswith("_pytest") else add(handler)  # type: ignore[method-assign]


#: Of these a file takes long however few tests it has: what its tests share is made by processes of their own. They begin first, so that
#: no worker is left with one of them at the end.
_LONG = (
    "tests/distributed/",
    "tests/context_parallel/",
    "tests/benchmarks/",
    "tests/fuzz/",
    "tests/test_examples.py",
    "tests/test_warm_starts.py",
    "tests/export/",
    "tests/gate/",
    "tests/hf/",
    "tests/integrations/",
    "tests/lowerings/triton/kernels/test_compiled.py",
    "tests/lowerings/fp8/kernels/",
    "tests/lowerings/hopper/kernels/test_compiled_forward.py",
    "tests/lowerings/linear/",
    "tests/test_always_runs.py",
    "tests/test_fp8_accuracy.py",
    "tests/test_fp8_training.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n alone, the tests of a file run in one worker, so that what they share is made once. Files come in `_begin_first`'s order."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def _begin_first(items: list[pytest.Item]) -> None:
    """In a worker of -n: files that take long, then those of many tests. The last ones are short, and workers are done at the same time."""
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    order = sorted(tests, key=lambda file: (not file.startswith(_LONG), -tests[file]))
    place = {file: i for i, file in enumerate(order)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before -m takes out what is marked."""
    mark_turns(items)
    if hasattr(config, "workerinput"):
        _begin_first(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lasts, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """pytest's own, in whose calls no frame waits for memory."""
    return quick.call(item.config.pluginmanager.get_plugin("runner").pytest_runtest_protocol, item, nextitem)


_modules = 0


def _freeze() -> None:
    """What was imported lasts: the garbage collector need not look at millions of its objects again and again."""
    global _modules
    if len(sys.modules) > _modules + 200:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


@pytest.fixture(scope="module")
def little_to_look_through() -> None:
    """For tests of what collects garbage: objects of earlier tests, which may be millions, take no part in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def each_test_alike() -> Iterator[None]:
    """Dynamo's caches are emptied after each test that used it: a function compiled again is traced again. Reports and verifications are
    forgotten, since only so many are kept. Each test draws the same random numbers, whichever tests the worker ran before."""
    random.seed(0)
    # torch.manual_seed would write down where it was called from, for each sort of device that is not there.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    quick.install_in_imported()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "attn_compiler.reporting.publishing" in sys.modules:
        sys.modules["attn_compiler.reporting.publishing"].reset()
    _freeze()
