"""The table of what is the same in every run, golden.csv beside this file. All of it anew, with that of decisions:

    python -m tests.gate

launch: grid and options of every kernel that a case of benchmarks.kernel_code launches. code: registers, bytes of stack and of shared
memory of some, for each release of Triton that compiled them. splits, copies, backwards: plans.py. capture: captures.py.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import fresh
from tests.gate import plans, table

PATH = Path(__file__).with_name("golden.csv")
COMMAND = "python -m tests.gate"
#: what captures depend on besides our code
MADE_WITH = ("torch", "transformers", "python")

Lines = dict[tuple[str, str, str], str]


def launches(prelude: str = "") -> Lines:
    """prelude: code that runs before, in the process that looks at kernels."""
    return {
        ("launch", each["case"], f"{each['kernel']} {each['nth']}"): _launch(each)
        for each in _printed("kernels", ["launches"], prelude)
    }


def _launch(each: dict[str, Any]) -> str:
    grid = " x ".join(map(str, each["grid"]))
    return ", ".join([f"grid {grid}", *(f"{name} {value}" for name, value in each["options"])])


def code(prelude: str = "") -> Lines:
    """Of this Triton."""
    return {
        ("code", f"{each['case']}, Triton {triton_release()}", f"{each['kernel']} {each['nth']}"): (
            f"{each['registers']} registers, {each['stack']} bytes of stack, {each['shared']} of shared memory"
        )
        for each in _printed("kernels", ["code"], prelude)
    }


def triton_release() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def captures(names: Sequence[str] = (), prelude: str = "") -> Lines:
    """names: of families; all without any."""
    found = _printed("captures", names, prelude)
    return {("capture", name, what): value for name, values in found.items() for what, value in values.items()}


def _printed(module: str, arguments: Sequence[str], prelude: str) -> Any:
    run = f"runpy.run_module('tests.gate.{module}', run_name='__main__')"
    code = f"{prelude}\nimport runpy, sys\nsys.argv = ['', *{list(arguments)!r}]\n{run}"
    done = fresh.run(code, of=fresh.KERNELS if module == "kernels" else "captures")
    return json.loads(done.stdout.splitlines()[-1])


def made_with() -> Lines:
    import torch
    import transformers

    versions = {
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "transformers": ".".join(transformers.__version__.split(".")[:2]),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    return {("made with", "captures", name): versions[name] for name in MADE_WITH}


def everything() -> Lines:
    """The table as it is now. Code of other releases of Triton stays."""
    kept = table.of_kinds(table.read(PATH), ["code"]) if PATH.exists() else {}
    found = {key: value for key, value in captures().items() if key[2] != "share"}
    return made_with() | launches() | plans.splits() | plans.copies() | plans.backwards() | found | kept | code()
