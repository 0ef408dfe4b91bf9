"""The list of lowerings, which every family is in, and what passes ask of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_compiler import lowerings
from attn_compiler.lowerings import LINEAR_NAMES, LOWERINGS, by_name, linear_table, names

FOLDER = Path(lowerings.__file__).parent
FLOORS = {"graph_ops", "shared", "choice", "fp8"}


def test_every_family_has_a_lowering_in_the_list() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    families = {type(lowering).__module__.split(".")[2] for lowering in LOWERINGS}
    of_linear = {type(lowering).__module__.split(".")[2] for lowering in linear_table.LINEAR_LOWERINGS}
    assert folders - FLOORS == families | of_linear


def test_options_may_name_every_lowering() -> None:
    assert set(names()) == {lowering.name for lowering in LOWERINGS} | set(LINEAR_NAMES)


def test_a_name_is_one_lowering() -> None:
    assert [by_name(lowering.name) for lowering in LOWERINGS] == list(LOWERINGS)


def test_an_unknown_name_is_told_which_there_are() -> None:
    with pytest.raises(KeyError) as caught:
        by_name("fa9")
    assert all(lowering.name in str(caught.value) for lowering in LOWERINGS)


def test_every_leaf_op_of_ours_but_no_other_has_a_packaged_twin() -> None:
    assert lowerings.packaged_twin(torch.ops.aten.mul.Tensor) is None
    assert lowerings.packaged_twin(torch.ops.attn_compiler.triton.default) is not None


def test_what_passes_ask_is_named() -> None:
    assert [name for name in lowerings.__all__ if not hasattr(lowerings, name)] == []
