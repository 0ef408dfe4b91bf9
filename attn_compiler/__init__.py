"""A torch.compile backend that makes attention in unmodified models fast, and says what it did.

`torch.compile(model, backend="attn_compiler")` needs no import of this package. This module has the functions that answer questions.

`explain(model, *args, options={...}, **kwargs)` says what would be done to each attention, and `explainer(dynamic=True)(model, *args,
**kwargs)` the same with other settings of torch.compile. `compare(model, *args, **kwargs)` times it beside Inductor and the uncompiled
model, and `comparer(training=True)(model, *args, **kwargs)` a training step. `rewrite(exported_program, options)` rewrites what
torch.export gave, for a package without this one. `reports()` says what was done in this process, and `reset()` forgets it.
`verifications()` says what `options={"verify": True}` compared with the model's own.

`Options` documents the options, `Fp8Recipe` and `ContextParallel` one each. `Report`, `Reports` and `Comparison` are what is given, and the
errors and the warning what can go wrong. Importing this package imports neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_compiler.compiling.comparing.compare import compare, comparer
    from attn_compiler.compiling.comparing.comparison import Comparison
    from attn_compiler.compiling.explaining import explain, explainer
    from attn_compiler.context_parallel import ContextParallel
    from attn_compiler.export import rewrite
    from attn_compiler.options.options import Options
    from attn_compiler.passes.writing.fp8_state import fp8_state_dict, load_fp8_state_dict
    from attn_compiler.reasons.errors import (
        AttnCompilerError,
        AttnCompilerWarning,
        CannotCompare,
        CompileFailed,
        ContextParallelInput,
        ContextParallelUnsupported,
        CudnnRefused,
        ExportUnsupported,
        InvalidOption,
        LoweringUnavailable,
        NotAnExportedProgram,
        PassFailed,
        ReportNotSaved,
        UnknownOption,
        UnsupportedTorch,
        VerificationMismatch,
        VerifyFailed,
    )
    from attn_compiler.reasons.fp8_errors import Fp8RecipeUnused, Fp8StateInvalid, Fp8StateMismatch, Fp8StateOutdated
    from attn_compiler.reporting.publishing import reports, reset
    from attn_compiler.reporting.report import Report, Reports
    from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
    from attn_compiler.verifying import verifications

__all__ = [
    "AttnCompilerError",
    "AttnCompilerWarning",
    "CannotCompare",
    "Comparison",
    "CompileFailed",
    "ContextParallel",
    "ContextParallelInput",
    "ContextParallelUnsupported",
    "CudnnRefused",
    "CurrentScaling",
    "DelayedScaling",
    "ExportUnsupported",
    "Fp8Recipe",
    "Fp8RecipeUnused",
    "Fp8StateInvalid",
    "Fp8StateMismatch",
    "Fp8StateOutdated",
    "InvalidOption",
    "LoweringUnavailable",
    "NotAnExportedProgram",
    "Options",
    "PassFailed",
    "Report",
    "ReportNotSaved",
    "Reports",
    "StaticScaling",
    "UnknownOption",
    "UnsupportedTorch",
    "VerificationMismatch",
    "VerifyFailed",
    "__version__",
    "compare",
    "comparer",
    "explain",
    "explainer",
    "fp8_state_dict",
    "load_fp8_state_dict",
    "reports",
    "reset",
    "rewrite",
    "verifications",
]

#: what each module gives to this one
_HOMES = {
    "compiling.comparing.compare": ("compare", "comparer"),
    "compiling.comparing.comparison": ("Comparison",),
    "compiling.explaining": ("explain", "explainer"),
    "context_parallel": ("ContextParallel",),
    "export": ("rewrite",),
    "options.options": ("Options",),
    "passes.writing.fp8_state": ("fp8_state_dict", "load_fp8_state_dict"),
    "reasons.errors": (
        *("AttnCompilerError", "AttnCompilerWarning", "CannotCompare", "CompileFailed", "ContextParallelInput"),
        *("ContextParallelUnsupported", "CudnnRefused", "ExportUnsupported", "InvalidOption", "LoweringUnavailable"),
        *("NotAnExportedProgram", "PassFailed", "ReportNotSaved", "UnknownOption", "UnsupportedTorch"),
        *("VerificationMismatch", "VerifyFailed"),
    ),
    "reasons.fp8_errors": ("Fp8RecipeUnused", "Fp8StateInvalid", "Fp8StateMismatch", "Fp8StateOutdated"),
    "reporting.publishing": ("reports", "reset"),
    "reporting.report": ("Report", "Reports"),
    "spec.fp8_recipe": ("CurrentScaling", "DelayedScaling", "Fp8Recipe", "StaticScaling"),
    "verifying": ("verifications",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("attn_compiler")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
