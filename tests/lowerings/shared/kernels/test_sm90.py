"""What kernels for Hopper share: tiles in registers, blocks of persistent programs, the fences that they need."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.shared.kernels import scheduling_sm90, tiles_sm90
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.proxies import Proxies, Unfenced

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


# What a warpgroup does with a tile in registers, run in PyTorch (gluon_in_torch.py).
@pytest.fixture
def in_torch() -> dict[str, Any]:
    return gluon_in_torch.scope(tiles_sm90, (0,), (1,))


def test_keys_up_to_a_number(in_torch: dict[str, Any]) -> None:
    most = torch.arange(-3, 61) * 3
    allowed = in_torch["up_to"](most, None)
    assert torch.equal(allowed, torch.arange(128)[None, :] <= most[:, None])


@pytest.mark.parametrize("size", [64, 128])
def test_bits_of_each_row(size: int, in_torch: dict[str, Any]) -> None:
    words = torch.randint(-(2**31), 2**31, (64, 6), dtype=torch.int64).to(torch.int32)
    found = in_torch["bits_set"](gluon_in_torch.Pointer(words.view(-1)), torch.arange(64) * 6, 2, None, size)
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    assert torch.equal(found, bits.flatten(1)[:, 64 : 64 + size] != 0)


def test_shares_add_up_to_the_sum(in_torch: dict[str, Any]) -> None:
    weights = torch.rand(64, 128)
    shares = in_torch["shares"](weights)
    assert shares.shape == (64, 4)
    torch.testing.assert_close(shares.sum(1), weights.sum(1))
    # What the tensor cores give to one thread of four: two neighbours of every eight keys.
    torch.testing.assert_close(shares[:, 1], weights.view(64, 16, 8)[:, :, 2:4].sum((1, 2)))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_numbers_beyond_the_largest_become_it(dtype: torch.dtype, largest: float, in_torch: dict[str, Any]) -> None:
    x = torch.tensor([[0.0, 1.0, 256.0, 1e6]])
    found = in_torch["rounded"](x, types.SimpleNamespace(dtype=dtype))
    assert found.dtype == dtype
    assert found.float().tolist() == [[0.0, 1.0, 256.0, largest]]


def test_sums_of_whole_numbers_stay_what_they_are(in_torch: dict[str, Any]) -> None:
    most = 127 * 127 * 128
    sums = torch.tensor([-most, -65537, -1, 0, 1, 4097, most], dtype=torch.int32)
    assert in_torch["as_numbers"](sums).tolist() == sums.tolist()
    assert in_torch["as_numbers"](sums.float()).dtype == torch.float32


# Which blocks the programs of a persistent kernel take, run in PyTorch (gluon_in_torch.py).
def _taken(program: int, programs: int, *, section: int, blocks: int, heads: int) -> list[tuple[int, int]]:
    """Blocks and heads that a program takes, in order."""
    turn = gluon_in_torch.scope(scheduling_sm90, (program,), (programs,))["turn"]
    rounds = -(-blocks * heads // programs)
    found = [tuple(map(int, turn(nth, section, blocks, torch.tensor(heads)))) for nth in range(rounds)]
    return [(block, head) for is_one, block, head in found if is_one]


@pytest.mark.parametrize("section", [1, 4, 6])
@pytest.mark.parametrize("programs", [1, 5, 18])
def test_every_block_of_every_head_is_taken_once(programs: int, section: int) -> None:
    taken = [each for i in range(programs) for each in _taken(i, programs, section=section, blocks=3, heads=6)]
    assert sorted(taken) == [(block, head) for block in range(3) for head in range(6)]


def test_every_other_round_is_in_reverse_order() -> None:
    """So that each program gets about as much: under a causal mask a block grows with its number."""
    firsts = [_taken(i, 4, section=4, blocks=2, heads=4) for i in range(4)]
    assert [[block for block, _ in taken] for taken in firsts] == [[1, 0]] * 4
    assert [taken[0][1] for taken in firsts] == [taken[1][1] for taken in firsts[::-1]]


# The fences that kernels need are asked for.
def _elsewhere(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("by_thread", "asynchronously", "said"),
    [(False, True, "written by .*, read by"), (True, False, "read by .*, written by"), (True, True, "written by .*, written by")],
)  # fmt: skip
def test_a_fence_is_needed_unless_both_read(by_thread: bool, asynchronously: bool, said: str) -> None:
    proxies, memory = Proxies(), torch.zeros(4, 8)
    proxies.touch(memory, writes=by_thread)
    with pytest.raises(Unfenced, match=said):
        proxies.check(memory[3], writes=asynchronously)
    proxies.fence()
    proxies.check(memory[3], writes=asynchronously)


def test_both_may_read() -> None:
    proxies, memory = Proxies(), torch.zeros(4)
    proxies.touch(memory, writes=False)
    proxies.check(memory, writes=False)


def test_other_memory_needs_none() -> None:
    proxies, memory = Proxies(), torch.zeros(4, 8)
    proxies.touch(memory[1], writes=True)
    proxies.check(memory[0], writes=True)
    proxies.check(memory[2], writes=True)


def test_a_fence_is_of_one_thread() -> None:
    proxies, memory = Proxies(), torch.zeros(4)
    proxies.touch(memory, writes=False)
    _elsewhere(proxies.fence)
    with pytest.raises(Unfenced):
        proxies.check(memory, writes=True)
