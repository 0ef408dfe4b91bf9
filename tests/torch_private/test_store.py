"""Objects that PyTorch keeps for us."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from attn_compiler.torch_private import (
    compat as torch_compat,
    inductor as torch_inductor,
    snapshots as torch_snapshots,
    store,
)
from attn_compiler.torch_private.snapshots import Snapshot
from attn_compiler.torch_private.store import FOLDER, Store
from tests.passes.compiling import CPU_FLASH, captured, compiled


def test_what_was_put_comes_back_and_nothing_else(tmp_path: Path) -> None:
    one = Store(root=tmp_path)
    assert one.get("a") is None
    one.put("a", {"x": [1, "ü", None]})
    assert one.get("a") == {"x": [1, "ü", None]}
    assert one.get("b") is None
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["a.json"]


def test_a_file_under_another_name_is_missing(tmp_path: Path) -> None:
    one = Store(root=tmp_path)
    one.put("a", 1)
    one.path("a").rename(one.path("b"))
    assert one.get("b") is None


def test_readers_find_all_or_nothing_while_others_write(tmp_path: Path) -> None:
    one, long = Store(root=tmp_path), ["x" * 1000] * 500
    wrong: list[object] = []

    def write() -> None:
        for _ in range(20):
            one.put("a", long)

    def read() -> None:
        for _ in range(100):
            found = one.get("a")
            if found not in (None, long):
                wrong.append(found)

    threads = [threading.Thread(target=work) for work in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert one.get("a") == long
    assert len(list(one.folder.iterdir())) == 1


def test_the_files_that_nobody_used_for_longest_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 8)
    one = Store(root=tmp_path)
    for number in range(8):
        one.put(f"{number}", number)
        os.utime(one.path(f"{number}"), (number, number))
    assert one.get("0") == 0
    one.put("8", 8)
    left = {path.stem for path in one.folder.iterdir()}
    assert left == {"0", "4", "5", "6", "7", "8"}


def test_what_a_process_that_was_ended_left_goes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 1)
    one = Store(root=tmp_path)
    one.put("a", 1)
    for name in ("old.tmp", "new.tmp"):
        (one.folder / name).write_text("half of a")
    os.utime(one.folder / "old.tmp", (1, 1))
    one.put("b", 2)
    assert {path.name for path in one.folder.glob("*.tmp")} == {"new.tmp"}


def test_others_may_read_what_the_user_lets_them_read(tmp_path: Path) -> None:
    one, like = Store(root=tmp_path), tmp_path / "like"
    one.put("a", 1)
    like.write_text("")
    assert one.path("a").stat().st_mode == like.stat().st_mode


def test_a_place_that_can_not_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "attn_compiler").write_text("in the way")
    one = Store(root=tmp_path)
    one.put("a", 1)
    assert one.get("a") is None
    assert (tmp_path / "attn_compiler").read_text() == "in the way"


# What was done to Dynamo's graph can be taken back.
def _function(x: Tensor) -> Tensor:
    y = torch.utils.checkpoint.checkpoint(lambda x: x.relu() @ x, x, use_reentrant=False)
    return y + x.softmax(-1)


def _texts(gm: fx.GraphModule) -> list[str]:
    return [module.code for module in torch_compat.graph_modules(gm)]


def _add_nodes(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(torch.neg, output.args),)
    gm.recompile()


#: ways to change a graph module with one body, `wrap_body_0`
CHANGES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "nodes": _add_nodes,
    "nodes of a body": lambda gm: _add_nodes(gm.wrap_body_0),
    "another graph": lambda gm: setattr(gm, "graph", fx.Graph()),
    "a buffer": lambda gm: gm.register_buffer("extra", torch.zeros(2)),
    "a submodule": lambda gm: gm.add_module("extra", torch.nn.Identity()),
    "a body that is gone": lambda gm: delattr(gm, "wrap_body_0"),
    "meta": lambda gm: gm.meta.update(extra=1),
    "an attribute": lambda gm: setattr(gm, "extra", 1),
    "an attribute that is gone": lambda gm: gm.__dict__.pop("shape_env"),
    "meta of nodes": lambda gm: [node.meta.clear() for node in gm.graph.nodes],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_takes_back(change: str) -> None:
    gm, _ = captured(_function, torch.randn(4, 4))
    before = _texts(gm), set(dir(gm)), dict(gm.meta), sorted(gm.__dict__)
    metas = [list(node.meta) for node in gm.graph.nodes]
    sources = [getattr(node, "_dynamo_source", None) for node in gm.graph.nodes]
    body = gm.wrap_body_0
    snapshot = Snapshot(gm)
    CHANGES[change](gm)
    snapshot.restore()
    assert (_texts(gm), set(dir(gm)), dict(gm.meta), sorted(gm.__dict__)) == before
    assert [list(node.meta) for node in gm.graph.nodes] == metas
    assert [getattr(node, "_dynamo_source", None) for node in gm.graph.nodes] == sources
    assert any(sources)
    assert gm.wrap_body_0 is body
    x = torch.randn(4, 4)
    torch.testing.assert_close(gm(x)[0], _function(x))


def test_nodes_of_an_attempt_that_raised_are_gone() -> None:
    gm, _ = captured(_function, torch.randn(4, 4))
    before, first = gm.code, next(iter(gm.graph.nodes))
    made: list[fx.Node] = []

    def attempt() -> None:
        with torch_snapshots.taken_back_on_error(gm), gm.graph.inserting_after(first):
            made.append(gm.graph.placeholder("extra"))
            made.append(gm.graph.call_function(torch.neg, (first,)))
            made.append(gm.graph.call_function(torch.add, (made[-1], first)))
            gm.graph.erase_node(made[-1])
            made.append(gm.graph.call_method("sum", (made[1],)))
            raise KeyError("no")

    with pytest.raises(KeyError):
        attempt()
    assert all(map(torch_snapshots.is_erased, made))
    gm.graph.lint()
    gm.recompile()
    assert gm.code == before
    with torch_snapshots.taken_back_on_error(gm), gm.graph.inserting_after(first):
        kept = gm.graph.call_function(torch.neg, (first,))
    assert not torch_snapshots.is_erased(kept)
    assert gm._create_node_hooks == []


def test_bodies_that_were_traced_before_are_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd keeps the trace of a nested region by its name, which stands for another body after the graph was taken back."""
    compile_with_backend = torch_inductor.compile_with_backend
    seen: list[list[str]] = []

    def fail(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        nodes = [str(n.target) for m in torch_compat.graph_modules(gm) for n in m.graph.nodes]
        seen.append([target for target in nodes if CPU_FLASH in target])
        result = compile_with_backend(name, gm, example_inputs)
        if seen[-1]:
            raise RuntimeError("inner is broken")
        return result

    region = torch.compiler.nested_compile_region(lambda q: F.scaled_dot_product_attention(q, q, q))

    def function(q: Tensor) -> Tensor:
        return region(region(q)).sin()

    monkeypatch.setattr(torch_inductor, "compile_with_backend", fail)
    ours, theirs = (torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    run = compiled(function, strict=False, inner="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(ours.requires_grad_())
    wanted = function(theirs.requires_grad_())
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), ours), torch.autograd.grad(wanted.sum(), theirs))
    assert [bool(found) for found in seen] == [True, False]
    assert len([w for w in caught if "inner is broken" in str(w.message)]) == 1
