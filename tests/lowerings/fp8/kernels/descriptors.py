"""Of a kernel in Hopper's machine code, the tiles that its products read: whether every path to a product has set where they are, and from
what.

ptxas 12.8 was seen to set a part of a descriptor in front of a loop alone that a path may go around, and to read it in the next loop too.
Of a descriptor that is another one and a step, it was seen to add the step to a register that nothing had set, or to the stack pointer.
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
#: what the stack pointer comes from
_STACK = "c[0x0][0x28]"
#: their result is no sum of what they read
_FETCHES = re.compile(r"(@!?U?P\w+ )?(LD|ULD|ATOM|S2|\w*GMMA|MUFU)")
_SETS_NONE = re.compile(r"ST|RED|BAR|U?ISETP|[FHD]SETP|U?PLOP3|UTMA|SYNCS|BRA|CALL|RET|BSSY|WARP|U?CCTL|LDGSTS|\w*GMMA")
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


def from_nowhere(code: str) -> list[str]:
    """As `unset`, products that read a descriptor which comes from the stack pointer, or from a register that no instruction has set:
    "product: register <- the instruction that reads it"."""
    lines = [(int(at, 16), re.sub(r"\s+", " ", text)) for at, text in _LINE.findall(code)]
    texts, before = [text for _, text in lines], _before(lines)
    sets = [_set_by(text) for text in texts]
    last: dict[tuple[int, str], tuple[set[int], bool]] = {}
    found = []
    for i, (at, text) in enumerate(lines):
        product = _PRODUCT.search(text)
        if product is None:
            continue
        first = int(product[2])
        waiting = [(i, f"UR{register}") for register in range(first + (2 if product[1] else 0), first + 4)]
        seen: set[int] = set()
        while waiting:
            place, register = waiting.pop()
            if (place, register) not in last:
                last[place, register] = _last_setters(place, register, texts, sets, before)
            setters, is_set = last[place, register]
            if not is_set or any(_STACK in texts[j] for j in setters):
                found.append(f"{at:#x} {text}: {register} <- {texts[place]}")
                continue
            further = setters - seen
            seen |= further
            waiting += [(j, read) for j in further if not _FETCHES.match(texts[j]) for read in _read_by(texts[j])]
    return found


def _set_by(text: str) -> frozenset[str]:
    """The registers that an instruction sets, as far as what it sets may become a descriptor."""
    name, _, rest = _GUARD.sub("", text, count=1).partition(" ")
    first = re.match(r"(?:!?U?P\w+, )?(U?R)(\d+)\b", rest)
    if first is None or _SETS_NONE.match(name):
        return frozenset()
    is_wide = ".WIDE" in name or ".64" in name
    return frozenset(f"{first[1]}{int(first[2]) + i}" for i in range(4 if ".128" in name else 2 if is_wide else 1))


def _read_by(text: str) -> list[str]:
    """The registers that an instruction reads which sets its first one."""
    found = []
    for kind, number, half in re.findall(r"\b(U?R)(\d+)(\.64)?\b", _GUARD.sub("", text, count=1))[1:]:
        found += [f"{kind}{int(number) + i}" for i in range(2 if half else 1)]
    return found


def _last_setters(
    place: int, register: str, texts: Sequence[str], sets: Sequence[frozenset[str]], before: Sequence[Sequence[int]]
) -> tuple[set[int], bool]:
    """The instructions that may be the last to have set a register there, and whether there is one."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(before[place])
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if register in sets[i]:
            found.add(i)
            if _GUARD.match(texts[i]) is None:
                continue
        waiting += before[i]
    return found, bool(found)


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
    entries: list[int] = []
    reached = _reached(0, after, set())
    for i in range(len(lines)):
        if i not in reached:
            entries.append(i)
            _reached(i, after, reached)
    for i, (_, text) in enumerate(lines):
        if _GUARD.sub("", text, count=1).startswith(_INDIRECT):
            after[i] = entries
    before: list[list[int]] = [[] for _ in lines]
    for i, each in enumerate(after):
        for j in each:
            before[j].append(i)
    return before


def _reached(first: int, after: Sequence[Sequence[int]], reached: set[int]) -> set[int]:
    """Those that were reached before, and all that may run from one instruction on."""
    waiting = [first]
    while waiting:
        i = waiting.pop()
        if i not in reached:
            reached.add(i)
            waiting += after[i]
    return reached


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
