"""What is told of a packed graph, and fake inputs for another number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.passes.graph import padding_outcome as outcome
from attn_compiler.passes.graph.padding_outcome import Packed


def _packed(mode: FakeTensorMode | None = None, **changed: Any) -> Packed:
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    starts = mode.from_tensor(torch.empty(4, dtype=torch.int64), static_shapes=True)
    given: dict[str, Any] = {
        "facts": (),
        "zeroed": ("output 0",),
        "places": {},
        "writes": False,
        "dropout": False,
        "before": None,
        "original": None,
        "fakes": (),
        "inputs": outcome.fake_inputs(mode, 30, 7, starts),
        "mode": mode,
        "most": 30,
    }
    return Packed(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [({}, ()), ({"dropout": True}, ("statistically equal",)), ({"zeroed": ()}, ("nothing visible changes",))],
)
def test_people_are_told_of_what_differs(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    notes = _packed(**changed).notes
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_the_number_of_tokens_is_a_size_of_its_own() -> None:
    packed = _packed()
    number, tokens, rows, positions, begins, ends, starts = packed.inputs
    assert isinstance(number, torch.SymInt)
    assert {str(x.shape[0]) for x in (tokens, rows, positions, begins, ends)} == {str(number)}
    assert [x.dtype for x in (tokens, begins, starts)] == [torch.int64, torch.int32, torch.int64]
    assert starts.shape == (4,)


def test_another_number_of_tokens_is_another_size() -> None:
    packed = _packed()
    further = packed.further(19)
    assert str(further[0]) != str(packed.inputs[0])
    assert further[0].node.hint == 19
    assert str(further[1].shape[0]) == str(further[0])
    assert further[-1].shape == packed.inputs[-1].shape
