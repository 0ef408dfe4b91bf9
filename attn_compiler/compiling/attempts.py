"""Failures of a compilation on our side: each costs one step and is reported once, and the caller falls back."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from attn_compiler.options.options import Options, split_options
from attn_compiler.reasons.errors import AttnCompilerError, AttnCompilerWarning, CompileFailed, described
from attn_compiler.torch_private import compat as torch_compat


class StepFailed(Exception):
    """A failure on our side. Internal: the caller reports it and falls back."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.error = error
        self.cause = described(error)

    def warn(self, options: Options, graph: str, instead: str) -> str:
        """Warn, and return the text for the report; with options.strict raise instead."""
        said = CompileFailed(step=self.step, graph=graph, cause=self.cause, instead=instead)
        if options.strict:
            raise said from self.error
        warnings.warn(str(said), AttnCompilerWarning, stacklevel=2)
        text = f"{said}\n{''.join(traceback.format_exception(self.error))}"
        # Release what the frames hold, such as the memory that ran out.
        self.error.__traceback__ = None
        return text


def options_of(settings: Mapping[str, Any]) -> Options:
    """Return the options for a failure outside of a graph's compilation. settings: options= and mode= of torch.compile. Wrong settings give
    the defaults: compiling a graph raises the error."""
    try:
        return split_options(settings.get("mode"), settings.get("options"))[0]
    except AttnCompilerError:
        return Options()


@contextlib.contextmanager
def step(name: str, *, user_errors: bool = False) -> Iterator[None]:
    """Turn a failure of the block into StepFailed. user_errors: this package's errors name a mistake of the user, and pass through."""
    try:
        yield
    except Exception as error:
        if torch_compat.starts_over(error) or (user_errors and isinstance(error, AttnCompilerError)):
            raise
        raise StepFailed(name, error) from error
