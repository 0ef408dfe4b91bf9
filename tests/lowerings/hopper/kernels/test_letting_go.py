"""Machine code is read as the GPU runs it, and no load from shared memory is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_added_sm90
from tests.lowerings.hopper.kernels.letting_go import OF_THREADS, PLACES, told_by

_PLACE = PLACES["attention_forward_sm90"]
_LOAD, _ARRIVE = (min(_PLACE.lines(of))[1] for of in (_PLACE.load, _PLACE.arrive))
_LOWERINGS = Path(__file__).parents[4] / "attn_compiler" / "lowerings"
#: high halves of encodings: of what sets a scoreboard, waits for one, or neither
_SETS_1, _SETS_2, _SETS_NONE = 1 << 46, 2 << 46, 7 << 46
_WAITS_1, _WAITS_2 = 1 << 53 | _SETS_NONE, 1 << 54 | _SETS_NONE


def _code(*instructions: tuple[str, int, int]) -> str:
    """Of text, line and the high half of the encoding, as nvdisasm prints them."""
    lines = []
    for n, (text, line, high) in enumerate(instructions):
        lines += [f'\t//## File "{forward_added_sm90.__file__}", line {line}']
        lines += [f"        /*{16 * n:04x}*/    {text} ;    /* 0x00000000000079a7 */", f"       /* 0x{high:016x} */"]
    return "\n".join(lines)


_ARRIVES = ("@!P5 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x381d8], RZ", _ARRIVE, _SETS_NONE)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ([], 2),
        ([("FADD R1, R2, R3", _LOAD, _WAITS_1)], 0),
        ([("FADD R1, R2, R3", _LOAD, _SETS_NONE)], 2),
        ([("FADD R1, R2, R3", 1, _WAITS_1), ("LDS.64 R6, [R2]", _LOAD, _SETS_1)], 1),
        ([("LDSM.16.M88.4 R8, [R20]", _LOAD + 1, _SETS_1)], 2),
        ([("SHFL.BFLY PT, R8, R9, 0x2, 0x1f", 1, _SETS_2), ("FADD R1, R2, R3", 1, _WAITS_2)], 0),
        ([("SHFL.BFLY PT, R8, R9, 0x2, 0x1f", 1, _SETS_2)], 2),
    ],
    ids=["nothing", "a use", "no use", "a load after that", "another load", "a shuffle after them", "no use of it"],
)
def test_loads_that_nothing_has_waited_for(between: list[tuple[str, int, int]], expected: int) -> None:
    loads = [("LDSM.16.M88.4 R4, [R20]", _LOAD, _SETS_NONE), ("LDS.64 R4, [R20]", _LOAD, _SETS_1)]
    found = told_by(_code(*loads, *between, _ARRIVES), _PLACE)
    assert found.under_way == (expected,)
    assert found.loads == 2 + sum(1 for text, line, _ in between if "LDS" in text and line == _LOAD)


def test_a_load_that_comes_waits_for_those_before_it() -> None:
    first = ("LDS.64 R4, [R20]", _LOAD, _SETS_2)
    found = told_by(_code(first, ("LDS R5, [R20]", _LOAD, _SETS_1), ("IADD3", 1, _WAITS_1), _ARRIVES), _PLACE)
    assert found.under_way == (0,)


def test_each_load_from_shared_memory_is_of_a_place_or_of_what_threads_wrote() -> None:
    named = (*OF_THREADS, *(place.load for place in PLACES.values()))
    for path in (*_LOWERINGS.glob("hopper/kernels/*_sm90.py"), *_LOWERINGS.glob("*/kernels/*_sm90.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"(?<!gl)(?<!tl)\.load\(", line):
                assert any(of in line for of in named), (path.name, line)
    for place in PLACES.values():
        assert place.lines(place.load)
        assert place.lines(place.arrive)
