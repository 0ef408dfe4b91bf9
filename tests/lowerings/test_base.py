from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.base import LayoutDemand, Tile
from attn_compiler.spec.attention import TensorSpec

BSHD = TensorSpec(shape=(2, 4, 8, 64), strides=(2048, 64, 256, 1), dtype="bfloat16")
CUDA = LayoutDemand(alignment=16, zero_strides=False)


@pytest.mark.parametrize(
    ("strides", "said"),
    [
        ((2048, 64, 256, 1), None),
        ((2048, 512, 64, 1), None),
        ((2048, 1, 256, 4), "side by side; their stride is 4"),
        ((2048, 0, 256, 1), "repeated (stride 0) axis"),
        ((2080, 65, 260, 1), "multiples of 16 bytes; one is"),
        # Of overlapping heads: the stride of another axis than the last may be 1, too.
        ((2048, 1, 256, 1), "multiples of 16 bytes; one is 1 elements"),
    ],
)
def test_what_a_kernel_can_not_read_is_said(strides: tuple[int, ...], said: str | None) -> None:
    found = CUDA.broken_by(dataclasses.replace(BSHD, strides=strides))
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


def test_a_kernel_that_asks_for_nothing_reads_everything() -> None:
    anything = LayoutDemand(last_stride_one=False)
    assert anything.broken_by(dataclasses.replace(BSHD, strides=(7, 0, 3, 5))) is None


def test_the_stride_of_an_axis_of_size_one_says_nothing() -> None:
    one = TensorSpec(shape=(1, 4, 8, 64), strides=(3, 64, 256, 1), dtype="bfloat16")
    assert CUDA.broken_by(one) is None


def test_bytes_are_counted_in_the_tensors_dtype() -> None:
    strides = (1040, 65 * 4, 65 * 16, 1)
    assert LayoutDemand(alignment=16).broken_by(dataclasses.replace(BSHD, strides=strides, dtype="float32")) is None
    assert LayoutDemand(alignment=16).broken_by(dataclasses.replace(BSHD, strides=strides)) is not None


@pytest.mark.parametrize("words", ["64x128 w8 s3", "64x64 w4 s3 r168", "32x128 w8 s2 apart"])
def test_a_tile_is_read_as_it_is_written(words: str) -> None:
    assert Tile.read(words).words == words


def test_what_is_no_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="'64x64' is no tile"):
        Tile.read("64x64")
