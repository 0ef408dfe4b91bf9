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
    from attn_compiler.reasons.fp8_errors import (
        Fp8RecipeUnused,
        Fp8StateInvalid,
        Fp8StateMismatch,
        Fp8StateOutdated,
    )
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

_HOMES = {
    "AttnCompilerError": "attn_compiler.reasons.errors",
    "AttnCompilerWarning": "attn_compiler.reasons.errors",
    "CannotCompare": "attn_compiler.reasons.errors",
    "Comparison": "attn_compiler.compiling.comparing.comparison",
    "CompileFailed": "attn_compiler.reasons.errors",
    "ContextParallel": "attn_compiler.context_parallel",
    "ContextParallelInput": "attn_compiler.reasons.errors",
    "ContextParallelUnsupported": "attn_compiler.reasons.errors",
    "CudnnRefused": "attn_compiler.reasons.errors",
    "CurrentScaling": "attn_compiler.spec.fp8_recipe",
    "DelayedScaling": "attn_compiler.spec.fp8_recipe",
    "ExportUnsupported": "attn_compiler.reasons.errors",
    "Fp8Recipe": "attn_compiler.spec.fp8_recipe",
    "Fp8RecipeUnused": "attn_compiler.reasons.fp8_errors",
    "Fp8StateInvalid": "attn_compiler.reasons.fp8_errors",
    "Fp8StateMismatch": "attn_compiler.reasons.fp8_errors",
    "Fp8StateOutdated": "attn_compiler.reasons.fp8_errors",
    "InvalidOption": "attn_compiler.reasons.errors",
    "LoweringUnavailable": "attn_compiler.reasons.errors",
    "NotAnExportedProgram": "attn_compiler.reasons.errors",
    "Options": "attn_compiler.options.options",
    "PassFailed": "attn_compiler.reasons.errors",
    "Report": "attn_compiler.reporting.report",
    "ReportNotSaved": "attn_compiler.reasons.errors",
    "Reports": "attn_compiler.reporting.report",
    "StaticScaling": "attn_compiler.spec.fp8_recipe",
    "UnknownOption": "attn_compiler.reasons.errors",
    "UnsupportedTorch": "attn_compiler.reasons.errors",
    "VerificationMismatch": "attn_compiler.reasons.errors",
    "VerifyFailed": "attn_compiler.reasons.errors",
    "compare": "attn_compiler.compiling.comparing.compare",
    "comparer": "attn_compiler.compiling.comparing.compare",
    "explain": "attn_compiler.compiling.explaining",
    "explainer": "attn_compiler.compiling.explaining",
    "fp8_state_dict": "attn_compiler.passes.writing.fp8_state",
    "load_fp8_state_dict": "attn_compiler.passes.writing.fp8_state",
    "reports": "attn_compiler.reporting.publishing",
    "reset": "attn_compiler.reporting.publishing",
    "rewrite": "attn_compiler.export",
    "verifications": "attn_compiler.verifying",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("attn_compiler")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
