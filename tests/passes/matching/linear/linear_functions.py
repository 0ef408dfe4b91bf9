"""Functions with the parameters of a template, for tests of what is read of a text. None of them is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCALE = 2.0
NUMBERS = [2.0]


def by_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    """A recurrence, token by token."""
    q, k, v = query * key.shape[-1] ** -0.5, key, value
    batch, tokens, heads, dim = k.shape
    state = torch.zeros(batch, heads, dim, v.shape[-1], dtype=v.dtype) if initial_state is None else initial_state
    outs = []
    for i in range(tokens):
        state = state * g[:, i].exp()[..., None, None]
        u = beta[:, i][..., None] * (v[:, i] - (state * k[:, i].unsqueeze(-1)).sum(-2))
        state = state + k[:, i].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((state * q[:, i].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1), state if output_final_state else None


def reads_a_global(query: Tensor) -> Tensor:
    return query * SCALE


def reads_a_list(query: Tensor) -> Tensor:
    return query * NUMBERS[0]


def calls_another(query: Tensor) -> Tensor:
    return reads_a_global(reads_a_list(query))


def has_a_list(query: Tensor, by: list[float] = [2.0]) -> Tensor:  # noqa: B006 (which is refused)
    return query * by[0]


def has_two_names(query: Tensor) -> Tensor:
    return query * SCALE + sum(SCALE for SCALE in (1.0, 2.0))


def plain(query: Tensor, flag: bool = False) -> Tensor:
    """Words of a docstring."""
    # A comment.
    return query + 1 if flag else query


def of_another(number: float) -> Any:
    def inner(query: Tensor) -> Tensor:
        return query * number

    return inner
