"""The homes of lowerings and of helper ops, as data: a module is imported when what it defines is asked for.

A kept rewrite imports the families that it names, and no other. families.py makes its list from these lines.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.limits import untried
from attn_compiler.reasons.decisions import Reason

if TYPE_CHECKING:
    from attn_compiler.lowerings.base import Lowering
    from attn_compiler.spec.attention import AttentionSpec
    from attn_compiler.spec.linear import LinearSpec
    from attn_compiler.spec.target import Target

__all__ = ["LINEAR_NAMES", "by_name", "cannot_build", "cannot_repeat", "define", "has_failed", "names"]

#: the class of each lowering, in the order of lists
CLASSES: Mapping[str, str] = {
    "reference": "plain.reference.Reference",
    "reference_fp8": "plain.fp8_reference.ReferenceFp8",
    "sdpa_cudnn": "sdpa.lowering.SdpaCudnn",
    "sdpa_flash": "sdpa.lowering.SdpaFlash",
    "sdpa_efficient": "sdpa.lowering.SdpaEfficient",
    "sdpa_cpu_flash": "sdpa.lowering.SdpaCpuFlash",
    "rows": "rows.lowering.CpuRows",
    "fa4": "fa4.lowering.FlashAttention4",
    "hopper": "hopper.lowering.HopperAttention",
    "triton": "triton.lowering.TritonAttention",
    "hopper_fp8": "hopper.fp8.HopperFp8",
    "cudnn": "cudnn.lowering.CudnnAttention",
    "cudnn_fp8": "cudnn.fp8.CudnnFp8",
    "decode": "decode.lowering.Decode",
    "decode_latent": "decode.latent.DecodeLatent",
    "math": "plain.plain_math.PlainMath",
    "absorbed": "plain.absorbed.Absorbed",
    "untouched": "plain.untouched.Untouched",
}
#: the lowerings of linear attention, whose specs are others (linear/table.py)
LINEAR_NAMES = ("linear_reference", "linear_triton")
#: lowerings that may be refused when they are built
BUILT = frozenset({"cudnn", "cudnn_fp8", "fa4"})
#: families whose backward a lowering may have, besides its own
_BACKWARDS_OF: Mapping[str, str] = {"hopper": "triton", "hopper_fp8": "triton"}
#: modules of ops beside the leaf ops of families
_OPS: Mapping[str, str] = {
    "document_numbers": "shared.ops.documents",
    "gathered": "shared.calls.tables",
    "held": "shared.ops.leaf_ops",
    "keyless_gradient": "shared.calls.keyless_gradient",
    "tile_lists": "shared.ops.listing",
    **dict.fromkeys(("merged_parts", "as_part", "whole_of_parts"), "graph_ops.merging"),
    **dict.fromkeys(LINEAR_NAMES, "linear.table"),
}


def _module(name: str) -> Any:
    return importlib.import_module(f"attn_compiler.lowerings.{name}")


def names() -> tuple[str, ...]:
    """Return the names that options may give."""
    return *CLASSES, *LINEAR_NAMES


@functools.cache
def by_name(name: str) -> Lowering:
    """Return the lowering of that name. Raises KeyError that lists the known names."""
    if name not in CLASSES:
        raise KeyError(f"no lowering {name!r}; there are {', '.join(CLASSES)}")
    module, _, kind = CLASSES[name].rpartition(".")
    found: Lowering = getattr(_module(module), kind)()
    return found


def define(name: str) -> None:
    """Import what defines an op of ours, or the ops of a lowering: its module, or every family if it is not known which."""
    if name in _BACKWARDS_OF:
        _module(_BACKWARDS_OF[name])
    if name not in CLASSES:
        _module(_OPS.get(name, "families"))
        return
    module, _, _ = CLASSES[name].rpartition(".")
    # Importing a family defines its ops, but for those in FP8.
    _module(module if name.endswith("_fp8") else module.partition(".")[0])


def cannot_build(name: str, spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return why a lowering's kernels can't be built for a spec: they failed before, or the lowering itself says so."""
    return has_failed(name, spec, target) or by_name(name).cannot_build(spec, target)


def cannot_repeat(name: str, spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return why a lowering that was chosen in another process can't be built in this. Defines its ops. Raises KeyError as `by_name`."""
    define(name)
    is_asked = name in BUILT or name not in CLASSES
    return (cannot_build if is_asked else has_failed)(name, spec, target)


def has_failed(name: str, spec: AttentionSpec | LinearSpec, target: Target) -> list[Reason]:
    """Return the failures of a lowering's kernels so far, for this spec or on this machine."""
    return FAILURES.reasons(name, spec) or untried.reasons(name, target)
