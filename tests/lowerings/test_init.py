"""The list of lowerings: the protocol, golden decisions, and programs that a sanitizer runs."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
import torch

import attn_compiler
from attn_compiler import lowerings
from attn_compiler.lowerings import LOWERINGS, by_name, families, homes, linear_table
from attn_compiler.lowerings.base import LayoutDemand, Lowering, Tile
from attn_compiler.spec.attention import TensorSpec
from tests import fresh
from tests.gate import golden, table
from tests.lowerings import golden_decisions
from tests.passes.unpad import encoder

_FAMILY = """
import sys, torch
import attn_compiler.lowerings.homes as homes
homes.define(sys.argv[1])
rooms = {name.split(".")[2] for name in sys.modules if name.startswith("attn_compiler.lowerings.")}
print(*rooms - {"base", "homes", "shared", "fp8", "choice", "graph_ops"})
print(*(name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("attn_compiler::")))
"""


@pytest.mark.parametrize("name", [*homes.CLASSES, *homes._OPS])
def test_a_lowering_imports_its_family_and_the_ops_that_its_code_calls(name: str) -> None:
    """Of another family, at most the one whose backward it has. An op that is named imports no family."""
    rooms, ops = (set(line.split()) for line in fresh.run(_FAMILY, name).stdout.split("\n")[:2])
    wanted = {homes.CLASSES[name].split(".")[0]} if name in homes.CLASSES else set()
    assert rooms - {"linear"} == wanted | {homes._BACKWARDS_OF[name] for _ in wanted if name in homes._BACKWARDS_OF}
    assert name in ops or wanted
    given = [found[1] for op in ops if (found := re.fullmatch(r"(?:hopper_)?(\w+?)(?:_part|_rounded)?_given", op))]
    assert {f"{family}_backward" for family in given} <= ops


def test_a_name_is_one_lowering() -> None:
    assert [lowering.name for lowering in (*LOWERINGS, *linear_table.LINEAR_LOWERINGS)] == list(homes.names())
    assert {each.name for each in LOWERINGS if type(each).cannot_build is not Lowering.cannot_build} == homes.BUILT


def test_an_unknown_name_is_told_which_there_are() -> None:
    with pytest.raises(KeyError) as caught:
        by_name("fa9")
    assert all(lowering.name in str(caught.value) for lowering in LOWERINGS)


def test_every_leaf_op_of_ours_but_no_other_has_a_packaged_twin() -> None:
    assert lowerings.packaged_twin(torch.ops.aten.mul.Tensor) is None
    assert lowerings.packaged_twin(torch.ops.attn_compiler.triton.default) is not None


def test_what_passes_ask_is_named() -> None:
    assert [name for name in families.__all__ if not hasattr(lowerings, name)] == []


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


def test_decisions_are_those_of_the_table() -> None:
    file = io.StringIO()
    golden_decisions.write(file)
    said = table.differences(golden_decisions.read(), golden_decisions.parsed(file.getvalue()))
    assert not said, table.failure(said, golden.COMMAND)
    assert file.getvalue() == golden_decisions.PATH.read_text()


def test_rows_that_share_prompts_are_decided_on_as_their_graph_says() -> None:
    function = encoder.compiled(encoder.Decoder(), unpad=False, share_prefix=True)
    function(encoder.ids_of(encoder.MASK), encoder.MASK)
    (site,) = attn_compiler.reports()[-1].sites
    spec = golden_decisions.shared("float32", 64, training=False)
    assert (site.spec.mask.kinds, site.spec.k.shape[0]) == (spec.mask.kinds, spec.k.shape[0])
    assert "rows" in {
        value.split()[0] for key, value in golden_decisions.read().items() if key[1].startswith("shared_")
    }


def test_every_optional_kernel_is_decided_on() -> None:
    """A machine with a version that is not taken would say nothing of the family."""
    decided = golden_decisions.read()
    for machine, lowering in (("sm90_fa4", "fa4"), ("sm90_cudnn_frontend", "cudnn")):
        assert any(key[2] == machine and value.split()[0] == lowering for key, value in decided.items()), machine
