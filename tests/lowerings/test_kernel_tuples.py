"""The tuples of our kernels: all fields are read by a kernel, and none is told from another by its position."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import attn_compiler.lowerings as lowerings
from attn_compiler.lowerings.shared.kernels import tuples
from tests.lowerings import kernel_tuples

ROOT = Path(str(lowerings.__file__)).parent
#: what defines them -> the kernels that read them, and what else makes them
TUPLES = {
    "shared.kernels.tuples": (["**/*.py"], []),
    "shared.kernels.tuples_sm90": (["**/*.py"], []),
    "decode.kernels.tuples": (["decode/kernels/*.py"], ["decode/*launch.py"]),
    "decode.kernels.latent_sm90_tuples": (["decode/kernels/latent_sm90.py"], ["decode/latent_launch.py"]),
    "fp8.kernels.tuples_round": (["fp8/kernels/round_fp8.py"], ["fp8/rounding_launch.py"]),
    "hopper.kernels.fp8_tuples": (["hopper/kernels/forward_fp8_sm90.py"], ["hopper/fp8_launch.py"]),
    "hopper.kernels.tuples": (["hopper/kernels/*[!8]_sm90.py", "hopper/kernels/[av]*.py"], ["hopper/*launch.py"]),
}


def _files(globs: list[str], but: str) -> list[Path]:
    defining = ROOT.joinpath(*but.split(".")).with_suffix(".py")
    return [path for glob in globs for path in ROOT.glob(glob) if path != defining]


def test_the_table_has_all_tuples() -> None:
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("kernels/*tuples*.py")}
    assert found == TUPLES.keys()


@pytest.mark.parametrize("name", TUPLES)
def test_each_field_is_read_by_a_kernel_and_named_where_it_is_made(name: str) -> None:
    """Triton's cache of compiled kernels does not see what fields are called."""
    module = importlib.import_module(f"{lowerings.__name__}.{name}")
    kinds = kernel_tuples.tuples(module)
    kernels, makers = (_files(globs, but=name) for globs in TUPLES[name])
    assert kinds
    assert kernels
    assert kernel_tuples.unread(kinds, *kernels) == []
    assert kernel_tuples.made_by_position(kinds, *kernels, *makers) == []
    assert not any(name.split(".")[0] == "triton" for name in kernel_tuples.imports(module))


def test_what_a_launch_names_belongs_to_one_tuple() -> None:
    """A launch gives numbers by their bare names, so no two tuples that a kernel takes share one."""
    fields = [field for kind in tuples.TAKEN.values() for field in kind._fields]
    assert len(set(fields)) == len(fields)
    assert set(tuples.TAKEN.values()) <= set(kernel_tuples.tuples(tuples).values())


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("Pair(one=1, other=2)", False),
        ("Pair(**both)", False),
        ("Pair(one=1, **rest)", False),
        ("Pair(1, 2)", True),
        ("Pair(1, other=2)", True),
        ("Pair(one=1)", True),
        ("Pair(one=1, other=2, third=3)", True),
        ("Triple(1, 2, 3)", False),
    ],
)
def test_tuples_that_are_made_by_position_are_seen(source: str, is_found: bool, tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(source)
    assert kernel_tuples.made_by_position({"Pair": Pair}, file) == (["kernel.py:1 Pair"] if is_found else [])


def test_fields_that_nobody_reads_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("pair.one + one.two")
    assert kernel_tuples.unread({"Pair": Pair}, file) == ["Pair.other"]
