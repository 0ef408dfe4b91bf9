"""Of a kernel in Hopper's machine code, the tiles that its products read: whether every path to a product has set where they are.

ptxas 12.8 was seen to set a part of a descriptor in front of a loop alone that a path may go around, and to read it in the next loop too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", re.MULTILINE)
_GUARD = re.compile(r"@!?U?P\w+ ")
#: the product, whether its first operand is in registers, the first of four uniform registers that hold both descriptors
_PRODUCT = re.compile(r"GMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]")
_TARGET = re.compile(r"0x([0-9a-f]+)$")
_INDIRECT = ("BRX", "JMX")
#: a uniform register comes back from another one, where it was kept meanwhile
_BACK = re.compile(r"R2UR UR(\d+), (R\d+)$")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """sets: uniform registers. is_guarded: it may do nothing."""

    text: str
    sets: tuple[int, ...]
    is_guarded: bool


def unset(code: str) -> list[str]:
    """Of what `cuobjdump -sass` says, products that read a descriptor whose parts come from instructions of different kinds, by the path
    that led there: "product: register <- instructions"."""
    lines = [(int(at, 16), re.sub(r"\s+", " ", text)) for at, text in _LINE.findall(code)]
    instructions = [_instruction(text) for _, text in lines]
    before = _before(lines)
    found = []
    for i, (at, text) in enumerate(lines):
        product = _PRODUCT.search(text)
        if product is None:
            continue
        first = int(product[2])
        for register in range(first + (2 if product[1] else 0), first + 4):
            setters = _setters(i, register, instructions, before)
            kinds = {re.sub(r"UR\d+", "UR", setter) for setter in setters}
            if len(kinds) != 1 or "" in kinds:
                found.append(f"{at:#x} {text}: UR{register} <- {sorted(setters)}")
    return found


def _instruction(text: str) -> Instruction:
    plain = _GUARD.sub("", text, count=1)
    name, _, rest = plain.partition(" ")
    first = re.match(r"UR(\d+)\b", rest)
    is_uniform = name.startswith(("U", "R2UR", "S2UR", "CS2UR", "REDUX"))
    count = 2 if ".64" in name or ".WIDE" in name else 1
    sets = tuple(range(int(first[1]), int(first[1]) + count)) if first and is_uniform else ()
    return Instruction(text=plain, sets=sets, is_guarded=plain != text)


def _before(lines: Sequence[tuple[int, str]]) -> list[list[int]]:
    """For each instruction those that may run right before it."""
    places = {at: i for i, (at, _) in enumerate(lines)}
    after: list[list[int]] = []
    for i, (_, text) in enumerate(lines):
        plain = _GUARD.sub("", text, count=1)
        goes_on = [i + 1] if i + 1 < len(lines) else []
        target = _TARGET.search(plain) if plain.startswith("BRA") else None
        if target is not None:
            is_sure = plain == text and re.fullmatch(r"BRA 0x[0-9a-f]+", plain) is not None
            after.append([places[int(target[1], 16)], *([] if is_sure else goes_on)])
        elif plain.startswith(("EXIT", "RET", *_INDIRECT)) and plain == text:
            after.append([])
        else:
            after.append(goes_on)
    reached = {j for each in after for j in each}
    entries = [i for i in range(1, len(lines)) if i not in reached]
    for i, (_, text) in enumerate(lines):
        if _GUARD.sub("", text, count=1).startswith(_INDIRECT):
            after[i] = entries
    before: list[list[int]] = [[] for _ in lines]
    for i, each in enumerate(after):
        for j in each:
            before[j].append(i)
    return before


def _setters(
    place: int, register: int, instructions: Sequence[Instruction], before: Sequence[Sequence[int]]
) -> set[str]:
    """The instructions whose result may be in a register there; "" for none. What was kept elsewhere and is back is what it was."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = list(before[place])
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if register in instructions[i].sets:
            kept = _kept(i, instructions, before)
            if kept and not instructions[i].is_guarded:
                waiting += kept
                continue
            found.add(instructions[i].text)
            if not instructions[i].is_guarded:
                continue
        if not before[i]:
            found.add("")
        waiting += before[i]
    return found


def _kept(place: int, instructions: Sequence[Instruction], before: Sequence[Sequence[int]]) -> list[int]:
    """Where the uniform register that an instruction sets was kept, if on every path to it that was the last to set what it reads."""
    back = _BACK.match(instructions[place].text)
    if back is None:
        return []
    keeps = f"MOV {back[2]}, UR{back[1]}"
    sets = re.compile(rf"\S+ {back[2]}\b(?!\.reuse)")
    found: list[int] = []
    seen: set[int] = set()
    waiting = list(before[place])
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if instructions[i].text == keeps and not instructions[i].is_guarded:
            found.append(i)
        elif not before[i] or sets.match(instructions[i].text):
            return []
        else:
            waiting += before[i]
    return found
