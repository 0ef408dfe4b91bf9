"""Tests for a GPU name what there is, call it with arguments that it takes, and ask for fixtures that exist. Where there is no GPU, or not
the package that they are about, nothing else would tell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests import bound_names

TESTS = Path(__file__).parent
_MARK = "mark" + ".gpu"


def _of_a_gpu() -> list[Path]:
    return sorted(path for path in TESTS.rglob("test_*.py") if _MARK in path.read_text())


def _module(path: Path) -> ModuleType:
    return bound_names.module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))


@pytest.mark.parametrize("path", _of_a_gpu(), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_what_tests_for_a_gpu_name_is_there(path: Path) -> None:
    folders = [folder for folder in path.parents if folder.is_relative_to(TESTS) and (folder / "conftest.py").exists()]
    home = _module(path)
    assert bound_names.wrong(home) == []
    assert bound_names.without_fixture(home, [_module(folder / "conftest.py") for folder in folders]) == []


_PLANTED = """
import pytest
pytest.importorskip("flash_attn.cute")
from attn_compiler.lowerings.fa4 import launch
from attn_compiler.lowerings.linear import table
from attn_compiler.lowerings.shared.launching import replaying
from tests.lowerings.fa4 import cases
from tests.lowerings.fa4.cases import Built, inputs

def helper(built: Built):
    {helper}

@pytest.mark.gpu
def test_it({fixtures}):
    built = inputs(cases.PROBLEMS[0], device="cuda")
    helper(built)
    {test}
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def plant(test: str = "pass", helper: str = "pass", fixtures: str = "") -> ModuleType:
        (tmp_path / "planted.py").write_text(_PLANTED.format(test=test, helper=helper, fixtures=fixtures))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "planted", raising=False)
        importlib.invalidate_caches()
        return bound_names.module("planted")

    return plant


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("launch._prepared(built.text()).forwards", "has no forwards"),
        (
            "kept = launch._prepared(built.text())\n    for x in (kept.window, kept.backwards): pass",
            "kept has no backwards",
        ),
        ("launch.no_such_function(1)", "launch has no no_such_function"),
        ("replaying.Replay.no_such_method", "has no no_such_method"),
        ("built.spec.mask.no_such_field", "has no no_such_field"),
        ("built.spec_on_gpu.no_such_field", "has no no_such_field"),
        ("table.no_such_function", "table has no no_such_function"),
        ("pytest.MonkeyPatch().setattr(launch, 'no_such_name', 1)", "launch has no no_such_name"),
        ("inputs(cases.PROBLEMS[0], devise='cuda')", "missing a required"),
        ("inputs(cases.PROBLEMS[0], 'cuda')", "too many positional"),
        ("inputs(*cases.PROBLEMS, devise='cuda')", "unexpected keyword"),
        ("table.decide(1)", "missing a required"),
        ("built.text(90)", "too many positional"),
    ],
)
def test_what_has_gone_is_seen(test: str, said: str, planted: Callable[..., ModuleType]) -> None:
    for given in ({"test": test}, {"helper": test}):
        (found,) = bound_names.wrong(planted(**given))
        assert said in found


def test_what_is_there_is_right(planted: Callable[..., ModuleType]) -> None:
    bound_twice = "launch = launch if built else built\n    launch.no_such_name"
    for test in ("launch._prepared(built.text(sm=90)).window", "table.Path", bound_twice, "built.q.no_such_name"):
        home = planted(test=test, fixtures="tmp_path")
        assert bound_names.wrong(home) == bound_names.without_fixture(home) == []


def test_a_fixture_that_nobody_gives_is_seen(planted: Callable[..., ModuleType]) -> None:
    (found,) = bound_names.without_fixture(planted(fixtures="tmp_path, no_such_fixture"))
    assert "no_such_fixture" in found


def test_a_name_that_can_not_be_imported_is_seen(planted: Callable[..., ModuleType]) -> None:
    with pytest.raises(ImportError, match="no_such_module"):
        planted(helper="pass\nfrom attn_compiler.lowerings.fa4 import no_such_module")


def test_stand_ins_are_forgotten(planted: Callable[..., ModuleType]) -> None:
    planted()
    assert not [name for name, module in sys.modules.items() if isinstance(module, bound_names._StandIn)]
