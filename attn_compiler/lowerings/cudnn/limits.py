"""Limits and bugs of cuDNN's own graphs, by call and version. shared/limits/cudnn_limits.py has those of all of cuDNN."""

from __future__ import annotations

from dataclasses import replace

from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.cudnn.takes import TAKES
from attn_compiler.lowerings.shared.limits import common as limits, cudnn_limits, known_bad
from attn_compiler.lowerings.shared.limits.takes import check_gpu
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import CUDNN_FRONTEND_DISTRIBUTION, INSTALL, Target, cudnn_words

# 1.22 is the first to take addresses as a list (_execute_with_ptrs), and 1.27 the last. From 1.28 on they come as an array. A GPU ran the
# tests with 1.27 and 1.32.
_FIRST_FRONTEND, _FRONTEND_LIMIT = (1, 22), (1, 33)
# These set an attribute in every backward (CUDNN_ATTR_OPERATION_RESHAPE_MODE), which cuDNN knows from 9.22 on. 1.27 asks cuDNN first.
_RESHAPE_FRONTENDS, _RESHAPE_CUDNN = ((1, 24), (1, 25), (1, 26)), 92_200
# The first with sinks, and with windows that no diagonal bounds.
OLDEST_GRAPHS = 91_300


def check_machine(target: Target) -> list[Reason]:
    """Require a GPU that cuDNN's graphs run on, the library and its frontend."""
    gpu = check_gpu(TAKES, target)
    return gpu or [
        *cudnn_limits.check_version(target),
        *check_graph_version(target),
        *limits.check_switch("cudnn", target),
        *_check_frontend(target),
    ]


def check_graph(call: CudnnCall, spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse lengths, windows and biases that cuDNN gets wrong."""
    reasons = cudnn_limits.check_few(spec, target)
    lengths = f"seqlen_q {spec.seqlen_q}, seqlen_kv {spec.seqlen_kv}"
    if not dims.is_multiple(spec.seqlen_kv, 128):
        reasons += known_bad.refusal("keys_off_128", target, lengths)
    if call.left is not None and call.right != 0:
        reasons += known_bad.refusal("window", target, lengths)
    looks = call.lengths or (_has_band(call) and not call.bias)
    return reasons if looks else reasons + cudnn_limits.check_nan_backward(spec, target, with_queries=call.bias)


def counted(call: CudnnCall, spec: AttentionSpec, target: Target) -> CudnnCall:
    """Return the call with the number of keys where cuDNN otherwise reads behind the last key (nan_dq).

    On an H200 with cuDNN 9.19, scores far below 0 and 192 keys gave NaN without any mask, with a bias and with dropout; and none with a
    band, or with lengths beside any of these (tests/lowerings/cudnn/test_on_gpu.py).
    """
    if call.lengths or _has_band(call) or not cudnn_limits.check_nan_backward(spec, target, with_queries=call.bias):
        return call
    return replace(call, lengths=True, counted=True)


def _has_band(call: CudnnCall) -> bool:
    return call.left is not None or call.right is not None


def check_graph_version(target: Target) -> list[Reason]:
    """Require the first cuDNN that graphs are made for."""
    rule = f"cuDNN {cudnn_words(OLDEST_GRAPHS)} or newer for graphs of our own"
    too_old = cudnn_limits.OLDEST <= target.cudnn < OLDEST_GRAPHS
    return (
        [Reason(code=Code.LIBRARY_VERSION, rule=rule, observed=cudnn_words(target.cudnn), remedy="update cuDNN")]
        if too_old
        else []
    )


def _check_frontend(target: Target) -> list[Reason]:
    first, limit = (".".join(map(str, version)) for version in (_FIRST_FRONTEND, _FRONTEND_LIMIT))
    rule, remedy = f"nvidia-cudnn-frontend from {first} to before {limit}", INSTALL[CUDNN_FRONTEND_DISTRIBUTION]
    if not target.cudnn_frontend:
        return refuse(Code.LIBRARY_MISSING, rule, "not installed", remedy)
    release = limits.release(target.cudnn_frontend)
    if release in _RESHAPE_FRONTENDS and target.cudnn < _RESHAPE_CUDNN:
        return [_refused_attribute(target)]
    if _FIRST_FRONTEND <= release < _FRONTEND_LIMIT:
        return []
    return refuse(Code.LIBRARY_VERSION, rule, target.cudnn_frontend, remedy)


def _refused_attribute(target: Target) -> Reason:
    return Reason(
        code=Code.LIBRARY_VERSION,
        rule=f"nvidia-cudnn-frontend 1.24 to 1.26 with cuDNN {cudnn_words(_RESHAPE_CUDNN)} or newer, which knows their reshape mode",
        observed=f"{target.cudnn_frontend}, cuDNN {cudnn_words(target.cudnn)}",
        remedy="pip install 'nvidia-cudnn-frontend==1.27.*'",
    )
