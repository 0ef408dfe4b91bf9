"""Lists of tiles: the kernel against PyTorch's ops, and those against a plain search."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.shared import listing
from attn_compiler.lowerings.shared.listing import HEAD, listed

launch = pytest.importorskip("attn_compiler.lowerings.shared.listing_launch")

Tensor = torch.Tensor

#: batch, heads, blocks that have a list, blocks in it. The kernel takes 128 at once
SHAPES = [(1, 1, 1, 1), (2, 3, 1, 5), (1, 1, 2, 129), (1, 1, 1, 300)]


def states(shape: tuple[int, ...], seed: int, likely: float = 0.5) -> tuple[Tensor, Tensor]:
    """(some, holes) of random tiles. A tile without an allowed pair has a hole."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(shape, generator=generator) < likely
    holes = torch.rand(shape, generator=generator) > likely
    return some, holes | ~some


def sought(some: list[bool], holes: list[bool]) -> list[int]:
    """One row's list."""
    full = [a and not b for a, b in zip(some, holes, strict=True)]
    runs = [(i, j) for i in range(len(full)) for j in range(i + 1, len(full) + 1) if all(full[i:j])]
    first, end = max(runs, key=lambda run: (run[1] - run[0], -run[0]), default=(1, 1))
    partial = [i for i, a in enumerate(some) if a and not first <= i < end]
    rest = [i for i in range(len(some)) if i not in partial]
    return [len(partial), first, end, *partial, *rest]


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 4, 5)])
@pytest.mark.parametrize("by_key", [False, True])
def test_ops_against_a_search(shape: tuple[int, ...], by_key: bool) -> None:
    some, holes = states(shape, 0)
    found = listed(some, holes, by_key)
    rows = [x.transpose(2, 3).flatten(0, 2) if by_key else x.flatten(0, 2) for x in (some, holes)]
    wanted = [sought(a, b) for a, b in zip(rows[0].tolist(), rows[1].tolist(), strict=True)]
    assert found.flatten(0, 2).tolist() == wanted
    assert found.dtype == torch.int32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("likely", [0.0, 0.5, 0.9, 1.0])
def test_kernel_against_ops(shape: tuple[int, ...], likely: float) -> None:
    some, holes = states(shape, 1, likely)
    assert torch.equal(launch.lists(some, holes, False), listed(some, holes, False))


def test_kernel_by_key() -> None:
    some, holes = (x.transpose(2, 3) for x in states((1, 2, 2, 130), 6))
    assert torch.equal(launch.lists(some, holes, True), listed(some, holes, True))


def test_kernel_takes_any_strides() -> None:
    some, holes = states((2, 1, 4, 130), 2)
    some, holes = some.transpose(0, 1)[:, :, ::2], holes.permute(1, 0, 2, 3).contiguous()[:, :, 1::2]
    assert torch.equal(launch.lists(some, holes, False), listed(some, holes, False))


def test_kernel_takes_a_head_for_all() -> None:
    some, holes = (x.expand(2, 3, 2, 40) for x in states((2, 1, 2, 40), 3))
    assert torch.equal(launch.lists(some, holes, False), listed(some, holes, False))


@pytest.mark.parametrize("by_key", [False, True])
def test_fake_is_as_the_real_one(by_key: bool) -> None:
    some, holes = states((2, 3, 4, 5), 4)
    real = torch.ops.attn_compiler.tile_lists(some, holes, by_key)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.attn_compiler.tile_lists(mode.from_tensor(some), mode.from_tensor(holes), by_key)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 5, 64, 500, 2048])
def test_kernel_on_a_gpu(length: int) -> None:
    some, holes = (x.cuda() for x in states((2, 3, 7, length), 5))
    for by_key in (False, True):
        assert torch.equal(
            torch.ops.attn_compiler.tile_lists(some, holes, by_key).cpu(), listed(some.cpu(), holes.cpu(), by_key)
        )
    assert listing.empty_lists(some, True).shape == (2, 3, length, 7 + HEAD)
