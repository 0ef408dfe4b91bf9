"""Whether the installed package is whole: its version, license and data, and the backend that torch.compile finds by its name."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import sys
from pathlib import Path

import torch

import attn_compiler

#: what is no Python, each read by the package or by type checkers
DATA = ("py.typed", "lowerings/choice/fp8_sm90.csv", "lowerings/choice/priorities_sm90.csv", "reporting/page/page.css")


def problems() -> list[str]:
    """What is wrong, a sentence each."""
    found = []
    if not Path(attn_compiler.__file__).is_relative_to(sys.prefix):
        found.append(f"attn_compiler is imported from {attn_compiler.__file__}, not from the wheel in {sys.prefix}")
    metadata = importlib.metadata.metadata("attn_compiler")
    for name, wanted in (("License-Expression", "Apache-2.0"), ("Author", "attn_compiler developers")):
        if metadata[name] != wanted:
            found.append(f"{name} is {metadata[name]!r}, not {wanted!r}")
    if attn_compiler.__version__ != metadata["Version"]:
        found.append(f"__version__ is {attn_compiler.__version__}, the metadata says {metadata['Version']}")
    files = importlib.resources.files(attn_compiler)
    found += [f"{name} is not installed" for name in DATA if not files.joinpath(name).is_file()]
    return found + _compiled()


def _compiled() -> list[str]:
    """The entry point alone registers the backend: nothing here imports it."""
    q = torch.randn(1, 2, 8, 16)
    # "eager" leaves out Inductor's C++ compiler, which says nothing of the wheel.
    attend = torch.compile(
        torch.nn.functional.scaled_dot_product_attention, backend="attn_compiler", options={"inner": "eager"}
    )
    attend(q, q, q)
    sites = attn_compiler.reports().num_sites
    return [] if sites == 1 else [f"torch.compile found {sites} attention sites by the installed backend, not 1"]


def main() -> int:
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    print(
        f"attn_compiler {attn_compiler.__version__} is installed from its wheel"
        if not found
        else "the wheel is not whole"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
