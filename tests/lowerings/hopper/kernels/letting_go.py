"""Loads from shared memory that are under way where a kernel lets go of the place that they read, by its machine code.

Barriers order what has been read, not what was asked for: a thread arrives while its loads are under way, unless something before it waits
for them. Where threads write next, shared memory answers in order, and all is well. The copy engine has a port of its own: it wrote over
tiles that were being read. So nothing may be under way at an arrive after which the copy engine writes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import triton

from attn_compiler.lowerings.hopper.kernels import backward_sm90, forward_added_sm90
from attn_compiler.lowerings.linear.kernels import forward_sm90 as linear, tiles_sm90

#: beyond the last of the scoreboards that instructions wait for
_NONE = 6


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a kernel has threads read what the copy engine wrote. load, arrive: of the lines of its module that read and let go of it."""

    module: ModuleType
    load: str
    arrive: str

    def lines(self, of: str) -> frozenset[tuple[str, int]]:
        path = Path(str(self.module.__file__))
        text = path.read_text(encoding="utf-8").splitlines()
        return frozenset((path.name, n) for n, line in enumerate(text, start=1) if of in line)


_COPIED = Place(module=tiles_sm90, load="tile.load(LAYOUT)", arrive="mbarrier.arrive(barrier)")
#: by kernel
PLACES: Mapping[str, Place] = {
    "attention_forward_sm90": Place(
        module=forward_added_sm90,
        load="added.tiles.index(place).reshape([ROWS, how.BLOCK_N]).load(",
        arrive="mbarrier.arrive(added.empty.",
    ),
    "attention_backward_sm90": Place(
        module=backward_sm90, load="tiles.added.index(2 * stage + consumer)", arrive="mbarrier.arrive(barriers.q_empty."
    ),
    "state_pass_sm90": Place(module=linear, load="tiles.v.index(stage)", arrive="mbarrier.arrive(barriers.empty."),
    "reverse_pass_sm90": _COPIED,
    "head_gradients_sm90": _COPIED,
    "space_gradients_sm90": _COPIED,
}
#: further loads from shared memory in kernels for Hopper, by their first words: threads wrote what they read
OF_THREADS = ("tiles.index(at)", "stats.slice(", "tiles.weights", "tiles.decay", "tiles.grads", "tiles.firsts")
OF_THREADS += ("factors.slice(", "tile.load(gl.BlockedLayout", "c.load(ROW)", "less.load(ROW)")
OF_THREADS += (
    "numbers.slice(",
    "tiles.sums.",
    "lost.load(",
    "tiles.base.",
    "tiles.lasts.",
    "tiles.factors.",
    "tiles.bads.",
)


@dataclass(frozen=True, kw_only=True)
class LettingGo:
    """loads: all of the place. under_way: how many of them are, at each arrive."""

    loads: int
    under_way: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    """line: file and number. The file goes by its name alone: code from a cache names where another checkout had it.
    sets: the scoreboard that tells when it is done; none from `_NONE` on.
    waits: a bit for each one that it waits for.
    """

    text: str
    line: tuple[str, int]
    sets: int
    waits: int


def letting_go(cubin: bytes, kernel: str) -> LettingGo:
    return told_by(_disassembled(cubin), PLACES[kernel])


def told_by(code: str, place: Place) -> LettingGo:
    """code: of nvdisasm, with lines and encodings."""
    load_lines, arrive_lines = place.lines(place.load), place.lines(place.arrive)
    pending: list[tuple[bool, int]] = []
    loads, under_way = 0, []
    for each in _instructions(code):
        # Loads and shuffles are answered in order: with one that has come, all before it have. ptxas itself relies on it.
        done = max((n for n, (_, board) in enumerate(pending) if board < _NONE and each.waits >> board & 1), default=-1)
        pending = pending[done + 1 :]
        if re.search(r"\b(LDSM?|SHFL)\b", each.text):
            is_of_place = each.line in load_lines and "SHFL" not in each.text
            pending.append((is_of_place, each.sets))
            loads += is_of_place
        if "SYNCS.ARRIVE" in each.text and each.line in arrive_lines:
            under_way.append(sum(is_of_place for is_of_place, _ in pending))
    return LettingGo(loads=loads, under_way=tuple(under_way))


def _instructions(code: str) -> Iterator[_Instruction]:
    """An instruction is two lines: its text with the low half of its encoding, then the high half, which says what it waits for."""
    line, text = ("", 0), ""
    for each in code.splitlines():
        if named := re.search(r'//## File "([^"]+)", line (\d+)', each):
            line = (Path(named[1]).name, int(named[2]))
        elif begun := re.search(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/", each):
            text = begun[1]
        elif text and (high := re.search(r"^\s+/\* 0x([0-9a-f]{16}) \*/", each)):
            control = int(high[1], 16) >> 41
            yield _Instruction(text=text, line=line, sets=control >> 5 & 7, waits=control >> 11 & 0x3F)
            text = ""


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-g", "-hex", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
