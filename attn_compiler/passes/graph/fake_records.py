"""Fake tensors as data, and new ones made from it: of the same sizes, sharing memory in the same way.

Sizes are copied. A new tensor of symbolic sizes would compute with sympy all that is known of them, again for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from attn_compiler.passes.graph.fragment_keys import Unknown, number
from attn_compiler.torch_private import tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeLike:
    """The record of a tensor. like: a copy on the meta device. memory: index of its storage; inputs' come first, then new ones in order."""

    like: torch.Tensor
    device: torch.device
    memory: int


class FakeRecorder:
    """Records tensors that a call made. holders: one tensor for each storage that the call was given."""

    def __init__(self, holders: Sequence[torch.Tensor]) -> None:
        self._memory = [holder.untyped_storage()._cdata for holder in holders]
        self._dtypes = [holder.dtype for holder in holders]

    def made(self, value: Any) -> FakeLike:
        """Record a tensor, within `beside_modes` and without gradients. Raises Unknown for one that can't be made again."""
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise Unknown
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            number(size)
        storage = value.untyped_storage()._cdata
        if storage not in self._memory:
            self._memory.append(storage)
            self._dtypes.append(value.dtype)
        at = self._memory.index(storage)
        if self._dtypes[at] != value.dtype:
            raise Unknown
        return FakeLike(like=value.detach(), device=value.fake_device, memory=at)


class Remaker:
    """Makes recorded tensors again, in their order, for another call. To be used within `beside_modes`, without gradients."""

    def __init__(self, mode: FakeTensorMode, holders: Sequence[torch.Tensor]) -> None:
        self._mode = mode
        self._holders = list(holders)

    def fake(self, made: FakeLike) -> FakeTensor:
        like = made.like
        if made.memory < len(self._holders):
            # Outside of the modes, a view of a tensor that requires a gradient would require one, too.
            meta = self._holders[made.memory].detach().as_strided(like.shape, like.stride(), like.storage_offset())
        else:
            meta = torch_tracing.in_new_memory(like)
            self._holders.append(meta)
        return torch_tracing.fake(self._mode, meta, made.device)
