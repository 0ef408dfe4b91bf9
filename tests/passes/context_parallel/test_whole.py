"""What masks and biases read of inputs: only what is a part of the site's sequence is gathered."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.context_parallel.compiled import LENGTH, Attend, Data, Model, compile_and_run, positions


def _masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _up_to(name: str) -> Attend:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        bound = data[name] if name == "lengths" else data[name][:, 1]
        return _masked(torch.arange(k.shape[2]) < bound[:, None, None, None], q, k, v)

    return attend


_BOUNDS = {"lengths": torch.tensor([9, 14]), "spans": torch.tensor([[1, 5], [2, 9]])}


@pytest.mark.parametrize("name", _BOUNDS)
def test_an_input_of_another_length_is_no_part_of_the_sequence(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=rf"2 elements.*{LENGTH} positions.*replicated"):
        compile_and_run(attend=_up_to(name), data={name: _BOUNDS[name]})
    compile_and_run(attend=_up_to(name), data={name: _BOUNDS[name]}, replicated=(name,))


def test_what_is_read_along_the_sequence_is_read_by_positions() -> None:
    """As many lengths as positions: each rank has them all, or a part of them, and nothing tells which."""

    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return _masked(torch.arange(k.shape[2]) < data["lengths"][: k.shape[0], None, None, None], q, k, v)

    with pytest.raises(ContextParallelUnsupported):
        compile_and_run(attend=attend, data={"lengths": torch.full((LENGTH,), 9)})


def test_documents_are_counted_over_the_whole_sequence() -> None:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        documents = (data["position_ids"] == 0).cumsum(-1)
        return _masked(documents[:, None, :, None] == documents[:, None, None, :], q, k, v)

    compile_and_run(attend=attend, data={"position_ids": positions()})
