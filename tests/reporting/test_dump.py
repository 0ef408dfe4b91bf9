"""Dumps: what the files are called and hold, that they cost nothing when off, and that they never fail a compilation."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.compiling.backend import attn_compiler
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting import dump, publishing
from attn_compiler.reporting.dump import Dumper
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x).transpose(0, 1)
        return checkpoint(lambda t: (t @ t.transpose(-1, -2)).softmax(-1), y, use_reentrant=False).relu()


def capture(*, dynamic: bool = False) -> fx.GraphModule:
    """Dynamo's graph of Checkpointed, with a nested graph."""
    captured: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Checkpointed(), backend=backend, dynamic=dynamic)(torch.randn(3, 5, 8))
    torch._dynamo.reset()
    return captured[0]


def replace_relu(gm: fx.GraphModule) -> None:
    [relu] = [node for node in gm.graph.nodes if node.target == "relu"]
    with gm.graph.inserting_before(relu):
        new = [gm.graph.call_method(name, relu.args) for name in ("abs", "neg")]
    for node in new:
        node.meta.update(relu.meta)
    relu.replace_all_uses_with(new[1])
    gm.graph.erase_node(relu)


@pytest.fixture(autouse=True)
def artifacts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What goes to TORCH_TRACE, which is off unless a test turns it on."""
    written: dict[str, str] = {}

    def trace_artifact(name: str, payload: Callable[[], str], *, encoding: str = "string") -> None:
        assert name not in written
        written[name] = payload()

    monkeypatch.setattr(torch_observe, "is_traced", lambda: False)
    monkeypatch.setattr(torch_compat, "trace_artifact", trace_artifact)
    return written


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_files_of_a_run(tmp_path: Path, artifacts: dict[str, str]) -> None:
    gm = capture()
    dumper = Dumper.create(str(tmp_path / "new" / "deep"), "0/0")
    with dumper.around("match", gm):
        dumper.graph("mirror", gm.graph)
    with dumper.around("lower", gm):
        replace_relu(gm)
    dumper.text("note", lambda: "a note")
    dumper.text("note", lambda: "another")
    dumper.report(Report(graph="0/0", target="cpu"))
    folder = tmp_path / "new" / "deep" / "0_0"
    assert names(folder) == [
        "01_match.after.txt",
        "01_match.before.txt",
        "01_match.diff.txt",
        "01_mirror.txt",
        "02_lower.after.txt",
        "02_lower.before.txt",
        "02_lower.diff.txt",
        "02_note-2.txt",
        "02_note.txt",
        "report.html",
        "report.json",
        "report.txt",
    ]
    assert (folder / "01_match.before.txt").read_text() == (folder / "01_match.after.txt").read_text()
    assert (folder / "01_match.after.txt").read_text() == (folder / "02_lower.before.txt").read_text()
    assert (folder / "02_note-2.txt").read_text() == "another\n"
    assert json.loads((folder / "report.json").read_text())["graph"] == "0/0"
    assert "Graph 0/0" not in (folder / "report.html").read_text()
    assert "1 graph without attention: 0/0" in (folder / "report.html").read_text()
    assert not artifacts


def test_a_report_is_written_again_when_it_is_finished(tmp_path: Path) -> None:
    dumper = Dumper.create(str(tmp_path), "0/0")
    report = Report(graph="0/0", target="cpu", dumped=dumper.directory)
    dumper.report(report)
    dump.finished(dataclasses.replace(report, kernels=(("attention_forward", 1.5),)))
    [kernel] = json.loads((tmp_path / "0_0" / "report.json").read_text())["kernels"]
    assert kernel == {"kernel": "attention_forward", "seconds": 1.5}


def test_a_report_without_a_dump_is_written_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    dump.finished(Report(graph="0/0", target="cpu"))
    assert names(tmp_path) == []


def test_diff_file_has_op_counts_and_changed_lines(tmp_path: Path) -> None:
    gm = capture()
    dumper = Dumper.create(str(tmp_path), "g")
    with dumper.around("nothing", gm):
        pass
    with dumper.around("lower", gm):
        replace_relu(gm)
    same = (tmp_path / "g" / "01_nothing.diff.txt").read_text()
    assert same == "ops: 8, none added or removed\n\nthe graph's text is the same\n"
    changed = (tmp_path / "g" / "02_lower.diff.txt").read_text()
    counts, _, diff = changed.partition("\n\n")
    assert counts.splitlines() == [
        "ops: 8 -> 9 (+1)",
        "  abs: 0 -> 1 (+1)",
        "  neg: 0 -> 1 (+1)",
        "  relu: 1 -> 0 (-1)",
    ]
    assert [line.split()[1] for line in diff.splitlines() if line.startswith("-  ")] == ["relu:", "return"]
    assert [line.split()[1] for line in diff.splitlines() if line.startswith("+  ")] == ["abs_1:", "neg:", "return"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_graph_text_shows_shapes_strides_sources_and_nested_graphs(dynamic: bool) -> None:
    text = dump.graph_text(capture(dynamic=dynamic))
    if dynamic:
        assert '"f32[s77, s27, 8][8*s27, 8, 1]" = torch._C._nn.linear' in text
    else:
        assert '"f32[5, 3, 8][8, 40, 1]" = linear.transpose(0, 1)' in text
        assert '"f32[5, 3, 3][9, 3, 1]" = ' in text
    assert "class wrap_body_0" in text
    assert "# File:" in text
    assert "test_dump.py:" in text
    assert " = None" not in text


def test_code_of_shows_a_graph_without_a_module() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3).t()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    text = dump.code_of(graph)
    assert 'x: "f32[3, 2][1, 3]"' in text
    assert "torch.ops.aten.relu.default(x)" in text


def test_graph_text_survives_nodes_without_a_recorded_value() -> None:
    gm = capture()
    for node in gm.graph.nodes:
        node.meta.clear()
    assert "torch._C._nn.linear" in dump.graph_text(gm)


def test_op_counts_reach_nested_graphs_and_name_every_kind_of_target() -> None:
    assert dump.op_counts(capture()) == Counter(
        linear=1, transpose=2, tag_activation_checkpoint=1, getitem=1, matmul=1, softmax=1, relu=1
    )
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_module("child", (x,))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (y,)))
    gm = fx.GraphModule({"child": nn.GELU()}, graph)
    assert dump.op_counts(gm) == Counter({"GELU": 1, "aten.relu.default": 1})


def test_op_diff_puts_the_largest_change_first() -> None:
    before, after = Counter(a=1, matmul=12, same=3), Counter(matmul=8, b=2, same=3)
    assert dump.op_diff(before, after).splitlines() == [
        "ops: 16 -> 13 (-3)",
        "  matmul: 12 -> 8 (-4)",
        "  b: 0 -> 2 (+2)",
        "  a: 1 -> 0 (-1)",
    ]


def test_the_trace_gets_the_same_texts(
    tmp_path: Path, artifacts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_observe, "is_traced", lambda: True)
    gm = capture()
    for directory in (str(tmp_path), None):
        artifacts.clear()
        dumper = Dumper.create(directory, "0/0")
        with dumper.around("lower", gm):
            pass
        dumper.text("note", lambda: "a note")
        assert list(artifacts) == [
            "attn_compiler_01_lower.before",
            "attn_compiler_01_lower.after",
            "attn_compiler_01_lower.diff",
            "attn_compiler_01_note",
        ]
        for name, text in artifacts.items():
            path = tmp_path / "0_0" / f"{name.removeprefix('attn_compiler_')}.txt"
            assert path.read_text() == text + "\n"


def test_nothing_is_formatted_when_off(monkeypatch: pytest.MonkeyPatch, artifacts: dict[str, str]) -> None:
    def must_not_be_called(*_: Any, **__: Any) -> Any:
        raise AssertionError("formatted although dumps are off")

    gm = capture()
    for function in ("graph_text", "code_of", "op_counts"):
        monkeypatch.setattr(dump, function, must_not_be_called)
    monkeypatch.setattr(Report, "to_json", must_not_be_called)
    dumper = Dumper.create(None, "0/0")
    assert not dumper.enabled
    with dumper.around("lower", gm):
        dumper.text("note", must_not_be_called)
        dumper.graph("mirror", gm.graph)
    dumper.report(Report(graph="0/0", target="cpu"))
    assert not artifacts


def test_a_failing_pass_leaves_the_graph_it_stopped_at(tmp_path: Path) -> None:
    gm = capture()
    dumper = Dumper.create(str(tmp_path), "g")

    def failing_pass() -> None:
        with dumper.around("lower", gm):
            replace_relu(gm)
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        failing_pass()
    assert "abs()" in (tmp_path / "g" / "01_lower.after.txt").read_text()


def test_a_second_dump_of_a_graph_goes_beside_the_first(tmp_path: Path) -> None:
    for note in ("first", "second", "third"):
        Dumper.create(str(tmp_path), "0/0").text("note", note.format)
    assert {path.parent.name: path.read_text() for path in tmp_path.rglob("*.txt")} == {
        "0_0": "first\n",
        "0_0-2": "second\n",
        "0_0-3": "third\n",
    }


@pytest.mark.parametrize("graph_name", ["../../evil", "a b:c", "", "..", "-"])
def test_graph_names_stay_inside_the_dump_dir(tmp_path: Path, graph_name: str) -> None:
    inside = tmp_path / "inside"
    Dumper.create(str(inside), graph_name).text("note", lambda: "x")
    [path] = tmp_path.rglob("*.txt")
    assert path.parent.parent == inside


def test_ranks_have_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    Dumper.create(str(tmp_path), "0/0").text("note", lambda: "x")
    assert names(tmp_path) == ["rank3/0_0/00_note.txt"]


def test_a_dump_dir_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(AttnCompilerWarning, match="could not write the dump to .*file"):
        dumper = Dumper.create(str(blocked / "dumps"), "0/0")
    assert not dumper.enabled


@pytest.mark.parametrize(
    "dump_dir", ["a\0b", "a\udc80b", "~nobody_of_this_name/dumps", "/proc/dumps", "x" * 5000, "\ud800"]
)
def test_a_dump_dir_that_no_path_can_be_is_a_warning(
    dump_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifacts: dict[str, str]
) -> None:
    """The trace goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_observe, "is_traced", lambda: True)
    if dump_dir == "a\udc80b":
        # A file name of other bytes than UTF-8, which is one.
        assert Dumper.create(dump_dir, "0/0").enabled
        assert names(tmp_path) == []
        return
    with pytest.warns(AttnCompilerWarning, match="could not write the dump to .*Give a directory") as caught:
        dumper = Dumper.create(dump_dir, "0/0")
    assert len(caught) == 1
    str(caught[0].message).encode()
    dumper.text("note", lambda: "x")
    dumper.report(Report(graph="0/0", target="cpu"))
    assert list(artifacts) == ["attn_compiler_00_note"]


def test_a_text_of_what_is_no_character_is_written(tmp_path: Path) -> None:
    Dumper.create(str(tmp_path), "g").text("note", lambda: "a\udc80b")
    assert (tmp_path / "g" / "00_note.txt").read_text() == "a\\udc80b\n"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("x"), RecursionError("deep")])
def test_what_goes_wrong_while_a_dump_is_made_ends_the_dump(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = capture()
    dumper = Dumper.create(str(tmp_path), "g")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Path, "write_text", fail)
    done = []
    with pytest.warns(AttnCompilerWarning, match=type(error).__name__) as caught, dumper.around("lower", gm):
        done.append(replace_relu(gm))
    assert len(caught) == len(done) == 1
    assert not dumper.enabled


def test_a_dump_that_cannot_be_written_warns_once_and_stops(tmp_path: Path) -> None:
    gm = capture()
    dumper = Dumper.create(str(tmp_path), "g")
    (tmp_path / "g").rmdir()
    with pytest.warns(AttnCompilerWarning, match="options={'dump_dir': ...}"):
        dumper.text("note", lambda: "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dumper.around("lower", gm):
            pass
        dumper.report(Report(graph="0/0", target="cpu"))


def test_a_compiled_graph_leaves_its_page_with_drawings_and_diffs(tmp_path: Path) -> None:
    class Causal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    torch._dynamo.reset()
    options = {"dump_dir": str(tmp_path), "inner": "eager"}
    torch.compile(Causal(), backend=attn_compiler, options=options)(torch.randn(1, 2, 200, 8))
    torch._dynamo.reset()
    report = publishing.reports()[-1]
    assert report.dumped == str(tmp_path / "0_0")
    text = (tmp_path / "0_0" / "report.html").read_text()
    assert text.rstrip("\n") == report.to_html().rstrip("\n")
    assert "Of 4 tiles of 128 by 128: 1 skipped, 2 computed in part, 1 computed in full." in text
    assert "scaled_dot_product_attention: 1 -&gt; 0 (-1)" in text
