"""What a fork has of the process that asked for it, and of other forks: nothing that either did."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import fresh

of_forks = pytest.mark.skipif(torch.cuda.is_available(), reason="every process is a real one here")


def test_nothing_was_compiled_and_neither_we_nor_transformers_are_imported() -> None:
    code = """
import os, sys
import torch
ours = [name for name in sys.modules if name.split(".")[0] in ("attn_compiler", "transformers")]
print(ours, torch._dynamo.utils.counters["stats"]["unique_graphs"], len(os.listdir("/proc/self/task")))
"""
    assert fresh.run(code).stdout == "[] 0 1\n"


def test_a_fork_sees_nothing_of_another() -> None:
    code = "import sys; print(hasattr(sys, 'mark')); sys.mark = 1"
    assert [fresh.run(code).stdout for _ in range(2)] == ["False\n"] * 2


def test_code_runs_as_from_the_command_line(tmp_path: Path) -> None:
    code = "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ['COLUMNS'])"
    done = fresh.run(code, "a", "b", environment={"COLUMNS": "7"}, cwd=tmp_path)
    assert done.stdout.split() == ["__main__", "['a',", "'b']", str(tmp_path), "7"]


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit('no more')", 1, "no more"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os.abort()", -6, ""),
    ],
)
def test_how_it_ended_is_told(code: str, status: int, errors: str) -> None:
    done = fresh.run(code, check=False)
    assert done.returncode == status
    assert errors in done.stderr
    with pytest.raises(AssertionError, match=f"it ended with {status}"):
        fresh.run(code)


def test_what_is_registered_for_the_end_is_called() -> None:
    assert fresh.run("import atexit; atexit.register(print, 'the end')").stdout == "the end\n"


def test_several_threads_may_ask_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: fresh.run("import sys; print(sys.argv[1])", str(i)).stdout, range(8))
    assert list(found) == [f"{i}\n" for i in range(8)]


@of_forks
def test_a_variable_that_is_read_at_import_is_refused() -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        fresh.run("", environment={"PYTHONHASHSEED": "1"})
    assert fresh.run_anew("import os; print(os.environ['A'])", environment={"A": "1"}).stdout == "1\n"


@of_forks
def test_a_test_s_own_variables_do_not_reach_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first test to ask would decide for all."""
    monkeypatch.setenv("MINE", "1")
    assert fresh.run("import os; print('MINE' in os.environ)").stdout == "False\n"


def test_it_is_another_process() -> None:
    assert int(fresh.run("import os; print(os.getpid())").stdout) != os.getpid()
    assert fresh.run("import sys; print(sys.executable)").stdout.strip() == sys.executable
