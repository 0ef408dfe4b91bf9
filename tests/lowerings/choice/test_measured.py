"""A file of measured rows is read as a class says what its columns are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attn_compiler.lowerings.choice import fp8_speed, head_parts, hopper_added, in_order
from attn_compiler.lowerings.choice.measured import Table


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    pass_: str
    seqlen: int
    tflops: float
    training: bool
    backward: bool | None


def _table(folder: Path, *lines: str) -> Table[_Row]:
    path = folder / "rows.csv"
    path.write_text("\n".join(("name,pass,seqlen,tflops,training,backward", *lines)))
    return Table(path, _Row)


def test_columns_are_fields(tmp_path: Path) -> None:
    table = _table(tmp_path, "a,forward,8192,1.5,yes,", "b,backward,1,2,no,no")
    assert table.columns == ("name", "pass", "seqlen", "tflops", "training", "backward")
    assert table.rows() == (
        _Row(name="a", pass_="forward", seqlen=8192, tflops=1.5, training=True, backward=None),
        _Row(name="b", pass_="backward", seqlen=1, tflops=2.0, training=False, backward=False),
    )


def test_the_file_is_read_once(tmp_path: Path) -> None:
    table = _table(tmp_path, "a,forward,8192,1.5,yes,")
    assert table.rows() is table.rows()


def test_a_word_that_is_no_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="maybe"):
        _table(tmp_path, "a,forward,8192,1.5,maybe,").rows()


@pytest.mark.parametrize("module", [fp8_speed, head_parts, hopper_added, in_order], ids=lambda module: module.__name__)
def test_files_of_the_package_have_the_columns_of_their_class(module: object) -> None:
    table: Table[object] = module.TABLE  # type: ignore[attr-defined]
    assert tuple(table.path.read_text().splitlines()[0].split(",")) == table.columns
    assert table.rows()
