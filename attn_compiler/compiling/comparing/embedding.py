"""A model that embeds sentences by its `encode`, such as a SentenceTransformer: tokenizer, batches and pooling are timed, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from attn_compiler.torch_private import observe as torch_observe


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A call `model.encode(sentences, **settings)`."""

    model: Any
    sentences: tuple[str, ...]
    settings: Mapping[str, Any]

    def as_called(self, call: Callable[..., Any] | None) -> Callable[[], Any]:
        """Return the call with `call` in place of the model's own; None: as it was written."""

        def encode() -> Any:
            with torch_observe.called_as(self.model, call):
                return self.model.encode(list(self.sentences), **self.settings)

        return encode

    def compiled(
        self, backend: str, dynamic: bool | None, options: Mapping[str, Any] | None = None
    ) -> Callable[[], Any]:
        """Return the call after `model.compile(backend=...)`."""
        return self.as_called(torch_observe.compile_calls(self.model, backend, dynamic, options))


def encoding_of(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Encoding | None:
    """Return the call of `encode` if a module that has one is given a list of sentences; else None."""
    if len(args) != 1 or not isinstance(model, nn.Module) or not callable(getattr(model, "encode", None)):
        return None
    (sentences,) = args
    if not isinstance(sentences, list | tuple) or not sentences or not all(isinstance(x, str) for x in sentences):
        return None
    settings = {"convert_to_tensor": True, "show_progress_bar": False, **kwargs}
    return Encoding(model=model, sentences=tuple(sentences), settings=settings)
