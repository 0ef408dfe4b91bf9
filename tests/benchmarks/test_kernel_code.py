"""How the machine code of two checkouts is compared. That it is compiled takes minutes, and is no test."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import kernel_code

SAME = {"registers": "64", "stack": "0", "shared": "1024", "instructions": "9"} | dict.fromkeys(
    ("sass", "moved", "opcodes"), "a"
)


def row(case: str, **other: str) -> dict[str, str]:
    return {"case": case, "kernel": "attention_forward", "nth": "0", **SAME, **other}


def test_an_instruction_is_read_without_its_address() -> None:
    line = "        /*00b0*/              @!P0 LDG.E.128 R4, [R2.64] ;                 /* 0x0000000402047981 */"
    assert kernel_code._instruction(line) == "@!P0 LDG.E.128 R4, [R2.64]"
    assert kernel_code._instruction(".text.attention_forward:") == ""


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({"sass": "b"}, "arguments elsewhere"),
        ({"sass": "b", "moved": "b"}, "the same instructions, reordered"),
        (
            {"sass": "b", "moved": "b", "opcodes": "b", "registers": "80"},
            "another: registers 64 to 80, stack 0 to 0, shared 1024 to 1024, instructions 9 to 9",
        ),
    ],
)
def test_the_smallest_difference_is_named(other: dict[str, Any], verdict: str) -> None:
    said = kernel_code.compare([row("one"), row("two")], [row("one", **other), row("two")])
    assert said == [f"one attention_forward 0: {verdict}", f"1 {verdict}, 1 the same machine code"]


def test_a_kernel_of_one_checkout_alone_is_named() -> None:
    assert kernel_code.compare([row("one")], [])[0] == "one attention_forward 0: only before"
