"""Check of lowerings that replace FlexAttention's own kernel, or a library's that a model calls: they must read no tensor with an element
for each score.

Flex's kernel computes masks and biases as it goes, and skips blocks without any score. A tensor of B · H · Sq · Skv elements for another
kernel costs memory that the model does not need otherwise, and takes time. On one thread of a CPU (torch 2.13, q of (1, 8, 1024, 64) in
float32) Flex took 48 ms for a window of 128 keys, and PyTorch's flash kernel with that mask 122. Without a mask they took 119 and 70, and
for a causal one 91 and 76. On GPUs that was not measured.
"""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec

#: lowerings that write all scores to memory
_WRITE_SCORES = frozenset({"math", "reference", "reference_fp8"})


def check_flex_call(spec: AttentionSpec, name: str, reads_pairs: bool) -> list[Reason]:
    """Return why the lowering does not replace a call of FlexAttention's, or of a library's, that it could serve.

    reads_pairs: it reads a mask or bias with an element for each score.
    """
    if name in _WRITE_SCORES:
        return [_reason(name, "it writes the scores")]
    tensor = spec.added_tensor
    if tensor is None or not reads_pairs:
        return []
    shape = " × ".join(map(str, tensor.shape))
    return [_reason(name, f"it reads a tensor of {shape}: {spec.mask.reason or spec.mask.added or spec.mask.words}")]


def _reason(name: str, observed: str) -> Reason:
    return Reason(
        code=Code.OWN_KERNEL,
        rule="in place of a kernel that the model calls itself, none that needs an element for each score",
        observed=observed,
        remedy=f"options={{'lowering': {name!r}}} takes this kernel all the same",
    )
