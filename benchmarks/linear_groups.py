"""Heads of q and k that several heads of v share: transformers repeats them before its functions of the delta rule up to 5.17, and within
them in 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def has_groups(function: Callable[..., Any]) -> bool:
    """Whether a function of the delta rule repeats heads of q and k by itself."""
    return "repeat_interleave" in inspect.getsource(inspect.unwrap(function))


def for_each_head(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q and k (B, S, H, K) with a head for each one of v (B, S, H, V)."""
    heads = given["v"].shape[2]
    return {name: given[name].repeat_interleave(heads // given[name].shape[2], dim=2) for name in ("q", "k")}
