"""The name of the backend in PyTorch's registry, and the compilers behind it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.exc import SkipFrame

from attn_compiler.compiling.attempts import StepFailed, step
from attn_compiler.compiling.inner import Inner
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import AttnCompilerWarning, CompileFailed, InvalidOption
from tests import fresh

# The first torch.compile of a process may come from many threads at once.
ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, threading
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.linear(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)

barrier, failed, done = threading.Barrier(8), [], []

def work(width):
    layer, x = Layer(width), torch.randn(2, 2, 5, width)
    barrier.wait()
    try:
        run = torch.compile(layer, backend="attn_compiler", options={"inner": "eager", "strict": True})
        torch.testing.assert_close(run(x), layer(x))
        done.append(width)
    except BaseException as error:
        failed.append(repr(error)[:300])

threads = [threading.Thread(target=work, args=(4 + 4 * i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import attn_compiler
print(len(done), len(attn_compiler.reports()), attn_compiler.reports().num_sites, failed)
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the package with the entry points of this checkout, whatever is installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "attn_compiler-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn_compiler\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in points.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _run_in_a_fork(code: str, installed: dict[str, str]) -> str:
    """With the paths of `installed`, where entry points are looked for."""
    paths = installed["PYTHONPATH"].split(os.pathsep)
    return fresh.run(f"import sys\nsys.path[:0] = {paths!r}\n{code}").stdout.strip()


def _run(code: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.further
@pytest.mark.skipif(
    str(torch.__version__).startswith("2.11."), reason="torch 2.11 crashes there with backend='eager', too"
)
def test_eight_threads_at_once(installed: dict[str, str]) -> None:
    assert _run(PROGRAM, installed) == "8 8 8 []"


def test_the_name_is_there_without_an_import_of_ours_and_is_registered_once(installed: dict[str, str]) -> None:
    code = """
import sys, torch
assert "attn_compiler" in torch._dynamo.list_backends()
assert not [name for name in sys.modules if name.startswith("attn_compiler")]
for _ in range(2):
    torch.compile(torch.sin, backend="attn_compiler")
from attn_compiler.compiling.backend import attn_compiler
from torch._dynamo.backends.registry import lookup_backend
print(lookup_backend("attn_compiler") is attn_compiler, "attn_compiler" in torch._dynamo.list_backends())
"""
    assert _run_in_a_fork(code, installed) == "True True"


def test_an_entry_point_of_before_still_works(installed: dict[str, str], tmp_path: Path) -> None:
    """An editable installation keeps the old one until it is made again."""
    points = tmp_path / "attn_compiler-0.dist-info" / "entry_points.txt"
    points.write_text("[torch_dynamo_backends]\nattn_compiler = attn_compiler.compiling.backend:attn_compiler\n")
    code = """
import torch
torch.compile(torch.sin, backend="attn_compiler")
import attn_compiler.compiling.registration
torch.compile(torch.cos, backend="attn_compiler", options={"inner": "eager"})(torch.ones(1))
print("fine")
"""
    assert _run_in_a_fork(code, installed) == "fine"


# A step that fails is told once, as a warning or, with strict, as an error.
WRONG = InvalidOption(option="inner", value="''", expected="a compiler")


def test_a_failure_is_told_with_its_step_and_what_is_done_instead() -> None:
    with pytest.raises(StepFailed) as failed, step("bake"):
        raise ValueError("no flour")
    with pytest.warns(AttnCompilerWarning, match="bake.*no flour"):
        text = failed.value.warn(Options(), "0/0", "bread is bought")
    assert "bread is bought" in text
    assert "ValueError: no flour" in text


def test_strict_raises_it() -> None:
    with pytest.raises(StepFailed) as failed, step("bake"):
        raise ValueError("no flour")
    with pytest.raises(CompileFailed) as raised:
        failed.value.warn(Options(strict=True), "0/0", "bread is bought")
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_tells_dynamo_to_go_on_passes_through() -> None:
    with pytest.raises(SkipFrame), step("bake"):
        raise SkipFrame("leave it")


@pytest.mark.parametrize(("user_errors", "raised"), [(True, InvalidOption), (False, StepFailed)])
def test_what_users_did_wrong_passes_through_where_it_is_theirs(user_errors: bool, raised: type[Exception]) -> None:
    with pytest.raises(raised), step("bake", user_errors=user_errors):
        raise WRONG


def test_other_compilers_get_none_of_inductors_options(caplog: pytest.LogCaptureFixture) -> None:
    """What has no effect is told of."""
    inner = Inner(options=Options(inner="eager"), patches={"max_autotune": True}, region=None, ahead=None)
    gm = fx.symbolic_trace(lambda x: x.sin())
    with caplog.at_level(logging.WARNING, logger="attn_compiler.compiling.inner"):
        function = inner.compile_rewritten(gm, [torch.ones(3)], "key")
    torch.testing.assert_close(function(torch.ones(3)), torch.ones(3).sin())
    assert "max_autotune" in caplog.text
