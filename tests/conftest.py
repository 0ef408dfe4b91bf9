"""What every test shares: tests that need a GPU are skipped without one, and no test sees another's compiled code.

Property tests try the same examples in every run; HYPOTHESIS_PROFILE=explore tries new ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be known before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import quick_interpreter

quick_interpreter.install()

# Before any test module is imported: what they decorate takes these over.
settings.register_profile("explore")
settings.register_profile("repeat", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Dynamo's caches are emptied after each test that used it: a function compiled again is traced again."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
