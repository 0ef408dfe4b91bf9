"""A torch that was not tried may lack what this package needs: models run all the same."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.compiling import without_us
from tests import fresh

PROGRAM = """
import sys, warnings
import torch
from torch import nn

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "attn_compiler.{module}":
            raise ImportError("cannot import name 'CompileContext'")

sys.meta_path.insert(0, Missing())
tried, torch.__version__ = torch.__version__, "{version}"
model, x = nn.Linear(4, 4), torch.randn(2, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        found = torch.compile(model, backend="attn_compiler", options={{"strict": True, "max_autotune": False}})(x)
torch.testing.assert_close(found, model(x))
print(len([w for w in caught if "CompileContext" in str(w.message) and "Inductor alone" in str(w.message)]))
"""


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("module", ["compiling.backend", "passes"])
def test_a_newer_torch_that_lacks_something_has_inductor_alone(module: str) -> None:
    assert fresh.run_anew(PROGRAM.format(module=module, version="2.99.0")).stdout.strip() == "1"


def test_with_a_torch_that_was_tried_it_is_an_error() -> None:
    with pytest.raises(ImportError, match="broken"):
        without_us.or_raise(ImportError("broken"))


def test_options_of_ours_are_left_out() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    gm = torch.fx.symbolic_trace(double)
    x = torch.randn(3)
    run = without_us.compiled_by_inductor(gm, [x], options={"lowering": "math", "max_autotune": False})
    (found,) = run(x) if isinstance(run(x), (tuple, list)) else (run(x),)
    torch.testing.assert_close(found, x * 2)
