"""What the copy engine reads of what is added to the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.lowerings.hopper import added
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from tests.lowerings import kernel_problems


@pytest.fixture
def emitter() -> Any:
    return kernel_problems.Eager()


def _in_copies(values: torch.Tensor) -> torch.Tensor:
    """As `Plan.distances` has them."""
    length = -(-(values.shape[1] + 1) // 8) * 8
    padded = torch.nn.functional.pad(values, (0, length + 8 - values.shape[1]))
    return torch.stack([padded[:, p : p + length] for p in range(8)], 1)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (1, 300), (70, 130), (256, 64), (300, 77)])
def test_a_tile_of_numbers_by_distance_begins_at_its_first_distance(
    seqlen_q: int, seqlen_kv: int, emitter: Any
) -> None:
    values = torch.randn(2, seqlen_q + seqlen_kv - 1)
    found = added.of_distances(emitter, _in_copies(values), seqlen_q, seqlen_kv)
    assert found.shape[:3] == (1, 2, 64)
    assert found.stride(2) % 8 == 0
    zero = added.zero(seqlen_q)
    for query in range(0, seqlen_q, 37):
        for key in range(0, seqlen_kv, 29):
            first = query // 64 * 64
            got = found[0, :, query - first, key - first + zero]
            assert torch.equal(got, values[:, key - query + seqlen_q - 1])


@pytest.mark.parametrize("seqlen_q", [1, 64, 65, 200])
@pytest.mark.parametrize("queries", [128, 192])
def test_no_tile_begins_before_the_first_column(seqlen_q: int, queries: int) -> None:
    last = -(-seqlen_q // queries) * queries - 64
    assert added.zero(seqlen_q) - last >= 0
    assert (added.zero(seqlen_q) - last) % 64 == 0


@pytest.mark.parametrize(
    ("bias", "readable"),
    [
        (torch.empty(1, 2, 8, 16, dtype=torch.bfloat16), True),
        (torch.empty(1, 2, 8, 12, dtype=torch.bfloat16), False),
        (torch.empty(1, 2, 8, 12), True),
        (torch.empty(1, 2, 16, 8).transpose(2, 3), False),
        (torch.empty(1, 2, 1, 16).expand(1, 2, 8, 16), False),
        (torch.empty(1, 1, 1, 13), True),
    ],
)
def test_which_biases_are_read_where_they_are(bias: torch.Tensor, readable: bool, emitter: Any) -> None:
    assert added.is_readable(bias) is readable
    assert (added.of_bias(emitter, bias) is bias) is readable


def test_heads_and_batch_rows_that_are_repeated_are_read_once(emitter: Any) -> None:
    bias = torch.randn(1, 1, 8, 16).expand(3, 4, 8, 16)
    found = added.of_bias(emitter, bias)
    assert found.shape == (1, 1, 8, 16)
    assert found.data_ptr() == bias.data_ptr()


def test_what_begins_between_vectors_is_copied() -> None:
    memory = torch.randn(129)
    there, beside = memory[:128].view(1, 1, 8, 16), memory[1:].view(1, 1, 8, 16)
    first = torch.empty(3)
    assert there.data_ptr() % 16 == 0
    assert not added.begins_between_vectors(Plan(bias=True), [first, there])
    assert added.begins_between_vectors(Plan(bias=True), [first, beside])
    assert not added.begins_between_vectors(Plan(), [first, beside])
    same, copy = added.with_copy([first, beside])
    assert same is first
    assert torch.equal(copy, beside)
    assert copy.data_ptr() % 16 == 0


def test_what_has_the_operand() -> None:
    assert added.is_there(Plan(bias=True))
    assert added.is_there(Plan(distances=True))
    assert not added.is_there(Plan(slopes=True, mask=True))
    made: Any = {"bias": torch.randn(1, 1, 8, 16)}
    assert added.emit(kernel_problems.Eager(), Plan(bias=True), made, (8, 16)) is made["bias"]  # type: ignore[arg-type]
