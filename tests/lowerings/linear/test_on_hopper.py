"""Calls of linear attention that kernels for Hopper take: those that were timed, with operands that the copy engine can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.linear import triton_tensors
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.launching.replaying import CallCache
from tests.lowerings.linear.triton_problems import FORMS

#: tokens, heads
_S, _H = 70, 4


def _apart(before: int, row: int, *, dim: int = 128) -> Callable[[], Tensor]:
    """Rows of heads that begin `row` numbers after each other; those of the first token begin `before` numbers into memory."""

    def make() -> Tensor:
        memory = torch.zeros(before + 2 * _S * _H * max(row, dim), dtype=torch.bfloat16)
        return memory.as_strided((2, _S, _H, dim), (_S * _H * row, _H * row, row, 1), before)

    return make


def _not_at_a_vector() -> Tensor:
    """A tensor whose storage itself begins between vectors."""
    memory = torch.zeros(4 * _S * _H * 128 + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + 2
    return torch.from_numpy(memory.numpy()[begin : begin + 4 * _S * _H * 128]).view(torch.bfloat16).view(2, _S, _H, 128)


def _heads_first() -> Tensor:
    return torch.zeros(2, _H, _S, 64, dtype=torch.bfloat16).transpose(1, 2)


_PLAIN, _OF_64 = _apart(0, 128), _apart(0, 64, dim=64)


def _is_on_hopper(name: str, change: dict[str, Callable[[], Tensor]], *, out: str, has_wgmma: bool = True) -> bool:
    form = dataclasses.replace(FORMS[name], out_dtype=out)
    made = {"q": _PLAIN, "k": _PLAIN, "v": _OF_64 if name == "ssd" else _PLAIN, **change}
    q, k, v = made["q"](), made["k"](), made["v"]()
    g = torch.zeros(2, _S, _H, *((128,) if name == "channel" else ()))
    given = {"q": q, "k": k, "v": v, "g": g, "beta": g if name != "channel" else g[..., 0]}
    grads = [made["grad"](), torch.zeros(2, _H, 128, 128)] if "grad" in made else []
    with (
        mock.patch.object(triton_tensors, "_has_wgmma", return_value=has_wgmma),
        mock.patch.object(triton_tensors, "call_cache", return_value=CallCache(device=q.device)),
    ):
        return LinearTensors.of(f"linear_chunks{'_backward' * bool(grads)}", given, form.text, *grads).on_hopper


@pytest.mark.parametrize(
    ("name", "change", "out", "expected"),
    [
        ("delta", {}, "bfloat16", True),
        ("channel", {}, "bfloat16", True),
        ("ssd", {}, "float32", True),
        ("delta", {"grad": _PLAIN}, "bfloat16", True),
        ("channel", {"grad": _PLAIN}, "bfloat16", False),
        ("ssd", {"grad": _OF_64}, "float32", True),
        ("ssd", {"grad": _OF_64, "v": _heads_first}, "float32", False),
        ("ssd", {"v": _heads_first}, "float32", True),
        ("delta", {}, "float32", False),
        ("ssd", {}, "bfloat16", False),
        ("delta", {"v": _OF_64}, "bfloat16", False),
        ("delta", {"q": lambda: _PLAIN().half()}, "bfloat16", False),
        ("delta", {"k": _apart(8, 136)}, "bfloat16", True),
        ("delta", {"k": _apart(4, 128)}, "bfloat16", False),
        ("delta", {"v": _apart(0, 132)}, "bfloat16", False),
        ("delta", {"q": _not_at_a_vector}, "bfloat16", False),
        ("delta", {"grad": _apart(4, 128)}, "bfloat16", False),
        ("delta", {"k": lambda: _PLAIN()[:, :, :1].expand(-1, -1, _H, -1)}, "bfloat16", True),
        ("delta", {"k": lambda: _PLAIN()[:, :1].expand(-1, _S, -1, -1)}, "bfloat16", False),
        ("delta", {"k": lambda: _apart(0, 16)()}, "bfloat16", False),
    ],
)
def test_what_was_timed_and_can_be_copied(
    name: str, change: dict[str, Callable[[], Tensor]], out: str, expected: bool
) -> None:
    assert _is_on_hopper(name, change, out=out) is expected
    assert not _is_on_hopper(name, change, out=out, has_wgmma=False)
