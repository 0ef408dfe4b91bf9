"""Every block of Python in README and docs/ runs, or says why not and is at least right in its names."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attn_compiler
from attn_compiler.torch_private.frames import STORING_ONCE
from tests.integrations import launching
from website import tables

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n)?^```(?:python|py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: pages whose blocks other tests run word for word: tests/integrations
RUN_ELSEWHERE = frozenset({"recipes.md"})


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page. why: why it is not run; None: it is."""

    page: str
    code: str
    why: str | None


def blocks(page: Path) -> Iterator[Block]:
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(page=page.name, code=found["code"], why=found["why"])


WITH_BLOCKS = [page for page in PAGES if page.name not in RUN_ELSEWHERE and any(blocks(page))]


class Model(nn.Module):
    """What readers have: a small model with one attention, whose batch is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.project(x).view(3, 10, 2, 8).transpose(1, 2)
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)
        return y.transpose(1, 2).reshape(3, 10, 16)


def _what_readers_have() -> dict[str, Any]:
    x, mask = torch.randn(3, 10, 16), torch.arange(10) < torch.tensor([[4], [10], [7]])
    given = {"x": x, "inputs": {"x": x, "mask": mask}}
    return {"torch": torch, "attn_compiler": attn_compiler, "model": Model(), **given}


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    compile_as_ever = torch.compile

    def quickly(*args: Any, **kwargs: Any) -> Any:
        # What Inductor makes of it takes seconds, and is not what these blocks show.
        if kwargs.get("backend") == "inductor":
            return compile_as_ever(*args, backend="eager")
        if kwargs.get("backend") != "attn_compiler":
            return compile_as_ever(*args, **kwargs)
        given = kwargs.get("options", {})
        own = dataclasses.replace(given, inner="eager") if isinstance(given, attn_compiler.Options) else None
        return compile_as_ever(*args, **{**kwargs, "options": own or {"inner": "eager", **given}})

    monkeypatch.setattr(torch, "compile", quickly)
    names = _what_readers_have()
    # A page sets switches of Dynamo and Inductor, which the tests after it are to find as they were.
    freezing = {"freezing": False, "cpp.enable_concat_linear": False}
    with torch._dynamo.config.patch({STORING_ONCE: False}), torch._inductor.config.patch(freezing):
        for block in blocks(page):
            if block.why is None:
                # A page may show several ways to compile one model.
                names["model"] = Model()
                exec(compile(block.code, page.name, "exec"), names)


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_the_blocks_of_a_page_name_what_there_is(page: Path) -> None:
    for block in blocks(page):
        tree = ast.parse(block.code, page.name)
        assert [name for name in _named(tree) if not _is_there(name)] == []


def _named(tree: ast.AST) -> Iterator[str]:
    """What a block takes from this package: "attn_compiler.explain"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_compiler"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "attn_compiler":
            yield f"attn_compiler.{node.attr}"


def _is_there(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_a_name_that_is_gone_is_seen() -> None:
    named = _named(ast.parse("attn_compiler.explain(model)\nfrom attn_compiler.reporting.report import Rapport"))
    assert set(named) == {"attn_compiler.explain", "attn_compiler.reporting.report.Rapport"}
    assert _is_there("attn_compiler.explain")
    assert not _is_there("attn_compiler.reporting.report.Rapport")


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    left_out = {(block.page, block.why) for page in WITH_BLOCKS for block in blocks(page) if block.why is not None}
    assert {page for page, _ in left_out} == {"context_parallel.md", "export.md"}
    assert {launching.PAGE.name} == RUN_ELSEWHERE


def test_links_between_pages_lead_somewhere() -> None:
    """Those of the repository; mkdocs --strict asks for those of the site."""
    wrong = [
        f"{page.name}: {target}" for page in PAGES for target in _targets(page) if not (page.parent / target).exists()
    ]
    assert wrong == []


def _targets(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", tables.shown(page), flags=re.MULTILINE | re.DOTALL)
    return [x for x in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text) if "://" not in x]
