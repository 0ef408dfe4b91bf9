"""Calls that lie alike, and what is started again of them, with stand-ins for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.dry_run import noting
from attn_compiler.lowerings.shared.launching.on_device import Empty, KnownCalls
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Replay, Returned, Start, call_cache
from tests.lowerings.shared.lying import LYING_OTHERWISE


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: 0)


@dataclass
class Adds:
    """A launch that writes x + number to y, and keeps the addresses that it is given."""

    number: float
    x: str = "x"
    y: str = "y"
    runs: list[list[int]] = field(default_factory=list)

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        def start(tensors: list[Tensor], addresses: list[int]) -> None:
            self.runs.append(addresses.copy())
            assert addresses == [x.data_ptr() for x in tensors]
            torch.add(tensors[index[self.x]], self.number, out=tensors[index[self.y]])

        return start


def kept(*launches: Adds, q: Tensor, zeros: bool = False) -> CallCache:
    """A call of x, that makes y and z and returns z and y."""
    same = call_cache("op", "text", (q,))
    same.device = torch.device("cpu", 0)
    allocate = Empty.zeros_like if zeros else Empty.like
    same.empties = {"y": allocate(torch.empty(8)), "z": allocate(torch.empty(8))}
    same.keep(list(launches), inputs=("x",), returned=("z", "y"))
    return same


def test_a_replay_allocates_launches_in_order_and_returns() -> None:
    first, second = Adds(1.0), Adds(2.0, x="y", y="z")
    same = kept(first, second, q=torch.zeros(8))
    assert same.replay is not None
    for value in (3.0, 5.0):
        x = torch.full((8,), value)
        z, y = same.replay.run([x])
        assert (y.unique().item(), z.unique().item()) == (value + 1, value + 3)
        assert first.runs[-1] == second.runs[-1] == [x.data_ptr(), y.data_ptr(), z.data_ptr()]


def test_what_is_added_up_in_place_begins_with_nothing() -> None:
    same = kept(q=torch.zeros(8), zeros=True)
    assert same.replay is not None
    assert all(not x.any() for x in same.replay.run([torch.ones(8)]))


def test_a_call_with_a_launch_that_is_not_ready_is_not_replayed() -> None:
    same = call_cache("op", "text", (torch.zeros(8),))
    same.device = torch.device("cpu", 0)
    same.keep([Adds(1.0), None], inputs=("x",), returned=("x", None))
    assert same.replay is None


def test_calls_on_a_cpu_are_not_replayed() -> None:
    same = call_cache("op", "text", (torch.zeros(8),))
    same.keep([Adds(1.0)], inputs=("x", "y"), returned=("y", None))
    assert same.replay is None


def test_a_replay_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(replaying, "current_cuda_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    seen: list[int] = []
    replay = Replay(device=0, allocate=(), launch=lambda tensors, addresses: seen.append(current[-1]), returned=list)
    x = torch.zeros(8)
    assert replay.run([x])[0] is x
    assert (seen, current) == ([0], [1])


@pytest.mark.parametrize("other", LYING_OTHERWISE.values(), ids=LYING_OTHERWISE)
def test_calls_whose_tensors_lie_otherwise_are_not_alike(other: Tensor) -> None:
    x = torch.empty(4, 8)
    assert call_cache("op", "text", (x,)) is call_cache("op", "text", (torch.empty(4, 8),))
    assert call_cache("op", "text", (x,)) is not call_cache("op", "text", (other,))


def test_another_op_or_text_is_another_call() -> None:
    x = torch.empty(4, 8)
    assert call_cache("op", "text", (x,)) is not call_cache("op", "other", (x,))
    assert call_cache("op", "text", (x,)) is not call_cache("other", "text", (x,))


def test_nothing_is_kept_of_calls_whose_launches_are_noted(known_calls: KnownCalls[Any]) -> None:
    x = torch.empty(4, 8)
    with noting(lambda *_: None):
        assert call_cache("op", "text", (x,)) is not call_cache("op", "text", (x,))
    assert not known_calls


def test_an_output_is_like_the_first_one() -> None:
    same, made = call_cache("op", "text", (torch.empty(2),)), list[Tensor]()

    def make() -> Tensor:
        made.append(torch.empty(3, 5, 4, dtype=torch.float16).transpose(0, 1))
        return made[-1]

    first, second = same.empty("out", make), same.empty("out", make)
    assert len(made) == 1
    assert first is made[0]
    assert second.data_ptr() != first.data_ptr()
    assert (second.shape, second.stride(), second.dtype) == (first.shape, first.stride(), first.dtype)


def test_what_is_known_of_calls_does_not_grow_forever(
    known_calls: KnownCalls[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnownCalls, "_MOST", 3)
    for size in range(10):
        call_cache("op", "text", (torch.empty(size),))
    assert len(known_calls) <= 3


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (("z", "y"), ("z", "y")),
        (("y", None), ("y", None)),
        (("y", "z", "x", []), ("y", "z", "x", [])),
        (("y", "z", "x", ["z", "y"]), ("y", "z", "x", ["z", "y"])),
    ],
)
def test_what_is_returned_is_what_the_op_returns(returned: Returned, expected: tuple[Any, ...]) -> None:
    index = {"x": 0, "y": 1, "z": 2}
    tensors = [torch.full((1,), float(i)) for i in range(3)]
    found = replaying._taking(returned, index)(tensors)
    assert len(found) == len(expected)
    for one, name in zip(replaying.flat(found), replaying.flat(expected), strict=True):
        assert one is (None if name is None else tensors[index[name]])


def test_nothing_happens_where_an_address_has_bits_that_are_ruled_out() -> None:
    same = kept(launch := Adds(1.0), q=torch.zeros(8))
    assert same.replay is not None
    tensors = [torch.zeros(9)[1:]]
    assert same.replay.run(tensors, replaying.BETWEEN) is None
    assert (len(tensors), launch.runs) == (1, [])
    assert same.replay.run(tensors) is not None
