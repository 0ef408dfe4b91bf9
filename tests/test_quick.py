"""One variable decides whether anything is put into PyTorch: what a process has that tests start, too."""

from __future__ import annotations

import json

import pytest

from tests import fresh, quick, test_quick_tracing

_CHANGED = """
import json
from tests import fork_server, quick
quick.install()
import torch._inductor.compile_fx
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace
quick.install_in_imported()
looked_at = {
    "fake tensors": FakeTensorMode._make_cache_entry,
    "tracing": _symbolic_trace.Tracer.trace,
    "Inductor's C++": async_compile.AsyncCompile.cpp_pybinding,
}
print(json.dumps([name for name, function in looked_at.items() if hasattr(function, "__wrapped__")]))
print(quick.call(lambda: __import__("sys")._getframe(1).f_code.co_stacksize))
"""


def _changed(switch: str) -> tuple[list[str], int]:
    """Which functions of PyTorch are not its own, and how large the frame is that a test is called from."""
    names, size = fresh.run_anew(_CHANGED, environment={"TESTS_QUICK": switch}).stdout.splitlines()
    return json.loads(names), int(size)


@pytest.mark.further
def test_switched_off_pytorch_is_as_it_is() -> None:
    names, size = _changed("0")
    assert names == []
    assert size < 1000


@pytest.mark.further
def test_switched_on_tests_are_quick() -> None:
    names, size = _changed("1")
    assert {"tracing", "Inductor's C++"} <= set(names)
    assert size > 1000


@pytest.mark.skipif(quick.ON, reason="what is quick is tested in test_quick_tracing.py and its like")
def test_this_process_is_as_it_is() -> None:
    for name in test_quick_tracing.QUICK:
        assert not hasattr(getattr(test_quick_tracing.FakeTensorMode, name), "__wrapped__")
