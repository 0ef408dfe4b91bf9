"""The command line: what it prints, where, and with which exit code. What the doctor finds is test_doctor.py's."""

from __future__ import annotations

import subprocess
import sys

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
