"""Counts the attentions that a model runs eagerly, without any of the package's matching: the survey's independent answer.

An attention is a fused call (`F.scaled_dot_product_attention`, or one of torch.nn's whole-layer calls), or a softmax over
scores: a tensor that descends, through anything but another linear map, from a product of two activations. The second half
of that rule is what separates attention from a mixture-of-experts router, whose softmax is over `activation @ parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_FUSED: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    F.multi_head_attention_forward: "multi_head_attention_forward",
    torch._native_multi_head_attention: "_native_multi_head_attention",
    torch._transformer_encoder_layer_fwd: "_transformer_encoder_layer_fwd",
}
_SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax, torch._softmax})
_PRODUCT_NAMES = frozenset({"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__", "mm"})
_LINEAR_NAMES = frozenset({"linear", "addmm", "conv1d", "conv2d", "layer_norm", "embedding"})


@dataclass
class AttentionCounter(TorchFunctionMode):
    """Count attentions while active. `calls` names each one in the order it ran; `sites` is how many."""

    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._origin: Any = WeakIdKeyDictionary()

    @property
    def sites(self) -> int:
        return len(self.calls)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = list(_tensors((args, kwargs)))
        kinds = [self._kind(operand) for operand in operands]
        result = func(*args, **kwargs)
        kind = self._result_kind(func, kinds)
        if func in _FUSED:
            self.calls.append(_FUSED[func])
        elif func in _SOFTMAX and "scores" in kinds:
            self.calls.append("softmax")
        if kind != "activation":
            for tensor in _tensors(result):
                self._origin[tensor] = kind
        return result

    def _kind(self, tensor: torch.Tensor) -> str:
        if isinstance(tensor, torch.nn.Parameter):
            return "parameter"
        return str(self._origin.get(tensor, "activation"))

    def _result_kind(self, func: Callable[..., Any], kinds: list[str]) -> str:
        """What a call's results are: views and casts of a parameter stay one; a product of two activations makes scores."""
        name = getattr(func, "__name__", "")
        if func in _FUSED or name in _LINEAR_NAMES:
            return "activation"
        if name in _PRODUCT_NAMES:
            return "activation" if "parameter" in kinds else "scores"
        if "scores" in kinds:
            return "scores"
        return "parameter" if kinds and all(kind == "parameter" for kind in kinds) else "activation"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
