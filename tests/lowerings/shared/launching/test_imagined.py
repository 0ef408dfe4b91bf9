"""Tensors without memory lie as the values that they stand for, and have addresses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.lowerings.shared.launching import imagined
from attn_compiler.lowerings.shared.launching.imagined import Lying, NoExampleError, Pointer

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "slice": lambda x: x[:, 1:],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "no elements": lambda x: x[:, :0],
    "a number": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_stand_in_lies_as_its_value(view: str) -> None:
    value = VIEWS[view](torch.zeros(2, 3, 8, dtype=torch.bfloat16))
    with imagined.imagining():
        made = imagined.made(imagined.described(value))
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
        )
        assert made.storage_offset() == value.storage_offset()
        assert made.data_ptr() == 2 * value.storage_offset()


def test_addresses_of_views_follow_their_offsets() -> None:
    with imagined.imagining():
        x = Lying.of(torch.zeros(4, 8, dtype=torch.float32)).made()
        assert (x.data_ptr(), x.view(torch.uint8).data_ptr(), x.select(0, 1).data_ptr()) == (0, 0, 32)
        assert x.t().contiguous().data_ptr() == 0
        assert imagined.pointers((x.select(0, 1), 7, None)) == (Pointer(dtype=torch.float32, address=32), 7, None)


def test_a_gpu_that_is_not_there_can_be_imagined() -> None:
    with FakeTensorMode():
        value = torch.empty(2, 3, device="cuda:1")
    with imagined.imagining():
        made = imagined.made(imagined.described(value))
        assert (made.device, made.is_cuda, made.data_ptr()) == (torch.device("cuda:1"), True, 0)


def test_lists_and_what_is_no_tensor_stay() -> None:
    value = torch.zeros(3)
    described = imagined.described([value, None, "text", 2.5])
    assert described == imagined.described([torch.ones(3), None, "text", 2.5])
    with imagined.imagining():
        tensor, *others = imagined.made(described)
    assert (tuple(tensor.shape), others) == ((3,), [None, "text", 2.5])


def test_symbolic_sizes_are_those_of_this_call_and_no_guard_is_added() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        value = mode.from_tensor(torch.zeros(5, 16), static_shapes=False)
        guards = len(env.guards)
        assert imagined.described(value) == Lying.of(torch.zeros(5, 16))
        assert imagined.described([value.shape[0] * 2]) == (10,)
        assert len(env.guards) == guards


def test_sizes_that_nobody_knows_while_compiling_are_told() -> None:
    env = ShapeEnv()
    with pytest.raises(NoExampleError, match="not known"):
        imagined.described(env.create_unbacked_symint())


def test_outside_of_the_block_tensors_have_their_own_addresses() -> None:
    x = torch.zeros(4)
    with imagined.imagining():
        pass
    assert x.data_ptr() != 0
