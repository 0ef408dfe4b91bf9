"""The command line: what it prints, where, and with which exit code. What the doctor finds is test_doctor.py's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import attn_compiler
from attn_compiler import __main__ as command_line
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages import PAGES


def test_the_command_line_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["code", "ac201"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"AC201: {PAGES[Code.DTYPE].title}")
    assert PAGES[Code.DTYPE].remedy in printed
    assert "why_not(" not in printed
    assert "attn_compiler.explain(model, **inputs)" in printed
    assert command_line.main(["code", "ac901"]) == 0
    assert PAGES[Code.UNKNOWN_OPTION].example in capsys.readouterr().out
    assert command_line.main(["code", "AC999"]) == 2


def test_an_unknown_code_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["code", "AC000"]) == 2
    printed = capsys.readouterr()
    known = sorted(map(str, Code))
    assert f"no code AC000; codes are {known[0]} to {known[-1]}," in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("arguments", [["docter"], []])
def test_unknown_command_prints_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m attn_compiler" in capsys.readouterr().err


def test_an_unknown_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["docter"])
    assert "there is no command 'docter'; did you mean 'doctor'?" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == f"attn_compiler {attn_compiler.__version__}\n"


def test_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "attn_compiler", "unknown"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "doctor" in run.stderr


MAKE = """
import torch
from torch import nn

class Attention(nn.Module):
    def forward(self, q, causal=True):
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

def named():
    return Attention(), {"q": torch.ones(1, 2, 8, 16), "causal": False}

def placed():
    return Attention(), torch.ones(1, 2, 8, 16)

def sentences():
    return Attention(), ["a cat", "a mat"]

def several():
    return Attention(), ("a cat", "a mat")

def wrong():
    return Attention()

if __name__ == "__main__":
    import sys
    model = torch.compile(Attention(), backend="attn_compiler", options={"inner": "eager"})
    model(torch.ones(1, 2, 8, 16))
    print("ran with", *sys.argv[1:])
    sys.exit(3)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.delitem(sys.modules, "make_model", raising=False)
    file = tmp_path / "make_model.py"
    file.write_text(MAKE)
    return file


def test_a_model_is_explained(make: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", f"{make}:placed", "--option", "lowering=math", "--details"]) == 0
    printed = capsys.readouterr().out
    assert "mask      causal\n" in printed
    assert "lowering  math\n" in printed


def test_a_program_of_one_site_is_printed(make: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", f"{make}:placed", "--repro", "1"]) == 0
    compile(capsys.readouterr().out, "repro.py", "exec")
    assert command_line.main(["explain", f"{make}:placed", "--repro", "2"]) == 2
    assert "a number from 1 to 1" in capsys.readouterr().err


def test_named_inputs_json_and_a_page(make: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = make.with_name("page.html")
    assert command_line.main(["explain", f"{make}:named", "--json", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["sites"][0]["mask"] == "none"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_model_is_compared(make: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    inputs: list[object] = []

    class Answer:
        def to_json(self) -> str:
            return "{}"

    def comparer(**settings: object) -> object:
        asked.update(settings)

        def compared(model: object, *args: object, **kwargs: object) -> Answer:
            inputs.append((*args, *kwargs))
            return Answer()

        return compared

    monkeypatch.setattr(attn_compiler, "comparer", comparer, raising=False)
    given = ["compare", f"{make}:named", "--training", "--seconds", "2", "--json", "--option", "unpad=true"]
    assert command_line.main(given) == 0
    assert asked == {"training": True, "seconds": 2.0, "mode": None, "dynamic": None, "options": {"unpad": True}}
    assert capsys.readouterr().out == "{}\n"
    for name in ("sentences", "several"):
        command_line.main(["compare", f"{make}:{name}"])
    assert inputs == [("q", "causal"), (["a cat", "a mat"],), ("a cat", "a mat")]


def test_what_a_script_compiles_is_reported(make: Path) -> None:
    command = [sys.executable, "-m", "attn_compiler", "report", str(make), "--epochs", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert run.stdout.startswith("ran with --epochs 2\n")
    assert "mask  causal\n" in run.stdout


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("placed", "FILE.py:NAME or MODULE:NAME"),
        ("nowhere.py:placed", "there is no file 'nowhere.py'"),
        ("no_such_module:placed", "no module 'no_such_module' can be imported"),
        ("MAKE:place", "has no 'place'; did you mean 'placed'?"),
        ("MAKE:wrong", "has to give two things, the model and its inputs; it gave a value of class Attention"),
    ],
)
def test_what_is_no_model_is_told(make: Path, place: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", place.replace("MAKE", str(make))]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(("option", "said"), [("unpad", "--option takes NAME=VALUE"), ("unpd=true", "AC901")])
def test_a_wrong_option_is_told(make: Path, option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", f"{make}:placed", "--option", option]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["report", "nowhere.py"]) == 2
    assert "there is no file 'nowhere.py'" in capsys.readouterr().err
