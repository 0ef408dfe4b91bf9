"""The diffs of a dump in the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_compiler.reporting.page import diffs
from tests.reporting.page.making import HOSTILE
from tests.reporting.page.reading import read

DIFF = "ops: 8 -> 9 (+1)\n  abs: 0 -> 1 (+1)\n\n--- before\n+++ after\n@@ -1,2 +1,2 @@\n same\n-old <b>\n+new\n"
SAME = "ops: 8, none added or removed\n\nthe graph's text is the same\n"


def _dump(folder: Path) -> None:
    (folder / "01_match.diff.txt").write_text(SAME)
    (folder / "02_lower.diff.txt").write_text(DIFF)
    (folder / "02_lower.after.txt").write_text("no diff")
    (folder / "report.json").write_text("{}")


def test_files_are_read_in_the_order_of_passes(tmp_path: Path) -> None:
    _dump(tmp_path)
    found = list(diffs.read(tmp_path))
    assert [(one.step, len(one.lines)) for one in found] == [("01 match", 0), ("02 lower", 6)]
    assert found[1].counts == ("ops: 8 -> 9 (+1)", "  abs: 0 -> 1 (+1)")


def test_changes_are_folded_and_marked(tmp_path: Path) -> None:
    _dump(tmp_path)
    shown = read(diffs.section(str(tmp_path)))
    fold = shown.one("details")
    assert "open" not in fold.attributes
    assert fold.one("summary").text == "02 lower: ops: 8 -> 9 (+1)"
    # The signs stay, so that colour is not all that tells.
    assert (fold.one("ins").text, fold.one("del").text) == ("+new\n", "-old <b>\n")
    assert fold.one("pre").text == "@@ -1,2 +1,2 @@\n same\n-old <b>\n+new\n"
    assert [item.text for item in fold.all("li")] == ["abs: 0 -> 1 (+1)"]
    assert "Nothing changed in 01 match." in shown.text
    assert str(tmp_path) in shown.text


def test_a_long_diff_ends_with_where_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs, "_LINES", 2)
    _dump(tmp_path)
    fold = read(diffs.section(str(tmp_path))).one("details")
    assert fold.one("pre").text == "@@ -1,2 +1,2 @@\n same\n"
    assert f"2 more lines are in {tmp_path / '02_lower.diff.txt'}" in fold.text


def test_without_a_dump_it_is_said_how_to_get_one() -> None:
    assert "options={'dump_dir': ...}" in read(diffs.section(None)).text


def test_a_dump_that_is_gone_costs_the_diffs(tmp_path: Path) -> None:
    assert "can't be read any more: No such file" in read(diffs.section(str(tmp_path / "gone"))).text


def test_names_in_a_graph_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "01_x.diff.txt").write_text(f"ops: 1 -> 2 (+1)\n  {HOSTILE}: 0 -> 1 (+1)\n\n--- a\n+++ b\n+{HOSTILE}\n")
    shown = read(diffs.section(str(tmp_path)))
    assert shown.all("script") == shown.all("img") == []
    assert shown.one("ins").text == f"+{HOSTILE}\n"
