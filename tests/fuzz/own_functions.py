"""Functions of linear attention that nobody has read, which rest on what is changed between two calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.passes.matching.linear.linear_functions import by_token

_T = Tensor

#: read by `by_setting`; `turn` sets it
SCALE = 1.0


def once(x: Tensor) -> Tensor:
    return x * 1.0


def twice(x: Tensor) -> Tensor:
    return x * 2.0


#: called by `by_helper`; `turn` sets it
changed = once


def turn(by: Tensor) -> None:
    """Set all that the functions rest on, by what a tensor holds: a call with the same shapes may find it otherwise."""
    global SCALE, changed
    SCALE, changed = (2.0, twice) if int(by.sum()) % 2 else (1.0, once)


# fmt: off
def by_setting(
    query: _T, key: _T, value: _T, g: _T, beta: _T, initial_state: Any, output_final_state: Any, use_qk_l2norm_in_kernel: Any
) -> Any:
    return by_token(query, key, value * SCALE, g, beta, initial_state, output_final_state)


def by_helper(
    query: _T, key: _T, value: _T, g: _T, beta: _T, initial_state: Any, output_final_state: Any, use_qk_l2norm_in_kernel: Any
) -> Any:
    return by_token(query, key, changed(value), g, beta, initial_state, output_final_state)


def by_gradient(
    query: _T, key: _T, value: _T, g: _T, beta: _T, initial_state: Any, output_final_state: Any, use_qk_l2norm_in_kernel: Any
) -> Any:
    scale = (2.0, 1.0)[value.requires_grad]
    return by_token(query, key, value * scale, g, beta, initial_state, output_final_state)
# fmt: on
