"""Compiled for Hopper, forwards keep what they compute in registers, and wait for products no more often than they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_compiler.lowerings.hopper.kernels import forward_added_sm90
from tests.lowerings.hopper.kernels import compiling, compiling_fp8
from tests.lowerings.hopper.kernels.compiling import ADDED, CASES, SUMMED, WIDE, Found
from tests.lowerings.hopper.kernels.compiling_fp8 import JOBS, Found as FoundFp8, Job
from tests.lowerings.hopper.kernels.letting_go import OF_THREADS, PLACES, told_by
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# Compiled for Hopper, the kernel keeps what it computes in registers, and waits for its products no more often than it is written.
SHARED = 227 * 1024
#: bytes of a thread: of what a block keeps beside its tiles
SPILLED = 48
#: of each warpgroup that computes: the scores of the first tile; of each of two loops scores and outputs; the last outputs
WAITS = 6
_CONSUMERS = 2
#: of what the rows of a mask that is all of several parts are computed again with, once in a while; the Triton family's, whose products
#: of 96 dims are two as well, and which reads dense masks as they are
_SPILLED_AGAIN, _SPILLED_AGAIN_BY_TWO = 512, 1024

#: Each part of a mask, each change of the scores, each pair of head dims.
_DAILY = (
    *("causal_64", "keys_64", "documents_128", "rows_128", "slopes_128", "causal_192_128", "softcap_256"),
    *("summed_80", "summed_96_window", "summed_112_keys"),
    *("bias_64_keys", "bias_128", "distances_128", "mask_128", "mask_bias_128"),
)
#: of summed head dims: what the tensor cores multiply along an axis at once, keys of a tile, and tiles that the code has
_STEP, _KEYS, _SCORES, _OUTPUTS = 16, 128, 3, 3


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str], Found]:
    names = [case.name for case in asked_for(request, "case")]
    return {(each["name"], each["kernel"]): Found(**each) for each in printed_by(compiling, *names)}


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize(
    "case", in_full((*CASES, *SUMMED, *ADDED), daily=lambda case: case.name in _DAILY), ids=lambda case: case.name
)
def test_little_is_spilled_and_products_do_not_wait_for_each_other(
    case: Case, compiled: dict[tuple[str, str], Found]
) -> None:
    found = compiled[case.name, "attention_forward_sm90"]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(SPILLED, f"hopper {case.name}")
    # ptxas waits after every product where it can't tell their registers apart.
    assert found.waits == WAITS * _CONSUMERS < found.products
    assert not found.unset
    again = compiled.get((case.name, "attention_again"))
    most = _SPILLED_AGAIN_BY_TWO if case in (*SUMMED, *ADDED) else _SPILLED_AGAIN
    assert again is None or again.spilled <= most_spilled(most, f"hopper {case.name}, again")


@pytest.mark.parametrize(
    "case",
    in_full([case for case in ADDED if case.bias or case.distances], daily=lambda case: case.name in _DAILY),
    ids=lambda case: case.name,
)
def test_a_tile_has_been_read_where_it_is_let_go_of(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """By each warpgroup, of the first tile and in each loop."""
    found = compiled[case.name, "attention_forward_sm90"]
    assert found.read >= _CONSUMERS * _SCORES
    assert found.under_way == [0] * _CONSUMERS * _SCORES


_OWN_SIZE = [case for case in SUMMED if max(case.head_dim, case.head_dim_v or 0) <= _KEYS]


@of_a_known_compiler
@pytest.mark.parametrize(
    "case",
    in_full([case for case in ADDED if case.bias], daily=lambda case: case.name in _DAILY),
    ids=lambda case: case.name,
)
def test_tiles_of_a_bias_are_read_as_matrices(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """Of the first tile and of each loop, by each warpgroup: four of 8 x 8 at once."""
    keys = _KEYS if case.head_dim <= _KEYS else _KEYS // 2
    assert compiled[case.name, "attention_forward_sm90"].matrices == _CONSUMERS * _SCORES * keys // 16


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(_OWN_SIZE, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_products_are_no_wider_than_the_sum(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """Scores have a product for every 16 dims, and outputs one for every 16 keys and part."""
    parts = [width for width in (64, 32, 16) if case.head_dim & width]
    scores = {str(_KEYS): _CONSUMERS * _SCORES * case.head_dim // _STEP}
    outputs = {str(width): _CONSUMERS * _OUTPUTS * _KEYS // _STEP for width in parts}
    assert compiled[case.name, "attention_forward_sm90"].columns == scores | outputs


# Compiled for Hopper, the kernel multiplies FP8 (or int8) on its tensor cores, and little spills.

#: bytes of a thread, of up to forty words at head dim 64 where four warpgroups share the registers, and a window's or a softcap's tile
FP8_SPILLED = 192

#: Each format, switch, optional tensor and head dim, and what has most to keep in registers.
_FP8_DAILY = ("causal_128", "int8_64", "e5m2_64", "window_128", "lengths_full_128", "window_softcap_sinks_64")


@pytest.fixture(scope="module")
def compiled_fp8(request: pytest.FixtureRequest) -> dict[str, FoundFp8]:
    names = [job.name for job in asked_for(request, "job")]
    return {each["name"]: FoundFp8(**each) for each in printed_by(compiling_fp8, *names)}


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize("job", in_full(JOBS, daily=lambda job: job.name in _FP8_DAILY), ids=lambda job: job.name)
def test_products_are_those_of_its_formats(job: Job, compiled_fp8: dict[str, FoundFp8]) -> None:
    found = compiled_fp8[job.name]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(FP8_SPILLED, f"hopper_fp8 {job.name}")
    assert not found.unset
    v = {"fp8e4nv": "f32.e4m3.e4m3", "fp8e5": "f32.e5m2.e5m2"}[job.v]
    qk = "s32.s8.s8" if job.qk == "i8" else v
    assert {name.split(".", 5)[-1] for name in found.instructions} >= {v}
    assert any(qk in name for name in found.instructions)
    assert all(v in name or qk in name for name in found.instructions)


# Compiled for Hopper, the kernel for wide heads keeps what it computes in registers, and waits for its products where it is written.

#: bytes of a thread, most of which the warpgroup that fetches has, and one in front of its loops; what was measured had 256
WIDE_SPILLED = 256
_WIDE_CONSUMERS, _WIDE_STEP, _PASS = 2, 16, 256
#: tiles of scores and of outputs that the code of a warpgroup has: the first one or the last one, and those of two loops
_TILES = 3

_WIDE_DAILY = ("wide_512_causal", "wide_512_keys")


@pytest.fixture(scope="module")
def compiled_wide(request: pytest.FixtureRequest) -> dict[str, Found]:
    names = [case.name for case in asked_for(request, "case")]
    found = (Found(**each) for each in printed_by(compiling, *names))
    return {each.name: each for each in found if each.kernel == "attention_forward_wide_sm90"}


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _WIDE_DAILY), ids=lambda case: case.name)
def test_little_is_spilled_and_products_do_not_wait_for_each_other_wide(
    case: Case, compiled_wide: dict[str, Found]
) -> None:
    found = compiled_wide[case.name]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(WIDE_SPILLED, f"hopper {case.name}")
    part = _PASS if case.head_dim % _PASS == 0 else _PASS // 2
    of_scores, of_outputs = case.head_dim // part, _PASS // part
    # One for each part of a tile: what it was multiplied from is let go of.
    assert found.waits == (of_scores + of_outputs) * _TILES * _WIDE_CONSUMERS
    assert found.columns == {
        "64": case.head_dim // _WIDE_STEP * _TILES * _WIDE_CONSUMERS,
        f"{part}": of_outputs * (64 // _WIDE_STEP) * _TILES * _WIDE_CONSUMERS,
    }
    assert not found.unset


# Machine code is read as the GPU runs it, and no load from shared memory is forgotten.
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
    assert all(place.lines(of) for place in PLACES.values() for of in (place.load, place.arrive))
