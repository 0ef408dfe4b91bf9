"""Faults in what is emitted, and in kernels: plain math, PyTorch's, the reference, Triton's in its interpreter."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, file: str, within: str | None, old: str, new: str, rule: str, why: str) -> Fault:
    return Fault(name=name, file=f"lowerings/{file}", within=within, old=old, new=new, rule=rule, why=why)


PLAIN = [
    _f("math: the cap only divides", "plain_math.py", "_scores", "emitter.call(torch.tanh, emitter.call(torch.div, scores, cap)), cap)", "emitter.call(torch.tanh, emitter.call(torch.div, scores, cap)), 1.0)", "math", "the cap is 1"),
    _f("math: strictly causal", "plain_math.py", "_diagonal", "torch.le, ", "torch.lt, ", "math", "a query does not see itself"),
    _f("math: the sink is kept", "plain_math.py", "_weights", "emitter.call(aten.slice.Tensor, weights, -1, 0, seqlen_kv)", "emitter.call(aten.slice.Tensor, weights, -1, 1, 9223372036854775807)", "math", "the first key is dropped for the sink"),
    _f("math: no sink", "plain_math.py", "_weights", "if sinks is None:", "if True:", "math", "the sink takes no part"),
    _f("math: heads in the other order", "plain_math.py", "_share_rows", "(heads_kv, -1)), 2, 3)", "(-1, heads_kv)), 1, 2)", "math", "query heads read other kv heads"),
    _f("math: bool masks are added", "plain_math.py", "_masked", "scores = emitter.call(torch.where, mask, scores, -torch.inf)", "scores = emitter.call(torch.add, scores, mask)", "math", "a mask adds one"),
    _f("math: masks are subtracted", "plain_math.py", "_masked", "scores = emitter.call(torch.add, scores, mask)", "scores = emitter.call(torch.sub, scores, mask)", "math", "a bias changes its sign"),
    _f("math: a negative scale is left", "plain_math.py", "_scores", "emitter.call(torch.mul, operands.q, spec.score.scale)", "emitter.call(torch.mul, operands.q, abs(spec.score.scale))", "math", "the largest score is the lowest"),
    _f("reference: no scale in the backward", "reference.py", "backward", "_through_softcap(grad_logits, scores, spec) * spec.score.scale", "_through_softcap(grad_logits, scores, spec)", "reference", "gradients of q and k are too large"),
    _f("reference: the cap's gradient", "reference.py", "_through_softcap", "grad * (1 - (scores.capped / cap).square())", "grad", "reference", "gradients are those of uncapped scores"),
    _f("reference: no row term", "reference.py", "backward", "grad_logits = weights * (grad_weights + row)", "grad_logits = weights * grad_weights", "reference", "the softmax's own term is left out"),
    _f("reference: the sink's gradient", "reference.py", "_operand_gradients", "gradients.append(grad_sinks.sum((0, 2, 3)))", "gradients.append(-grad_sinks.sum((0, 2, 3)))", "reference", "the sink learns the other way"),
    _f("reference: kv heads in the other order", "reference.py", "repeated", "tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)", "tensor.repeat(1, q.shape[1] // tensor.shape[1], 1, 1)", "reference", "query heads read other kv heads"),
    _f("reference: gradients of the wrong heads", "reference.py", "_folded", "grad.reshape(batch, heads_kv, grad.shape[1] // heads_kv, *grad.shape[2:]).sum(2)", "grad.reshape(batch, grad.shape[1] // heads_kv, heads_kv, *grad.shape[2:]).sum(1)", "reference", "gradients of k and v go to other heads"),
    _f("reference: bottom right is top left", "reference.py", "_causal", "<= rows + shift", "<= rows", "reference", "a diagonal starts elsewhere"),
    _f("reference: a bias's gradient is a mean", "reference.py", "_operand_gradients", "grad_logits.sum_to_size(x.shape)", "grad_logits.sum_to_size(x.shape) / max(grad_logits.shape[0], 1)", "reference", "a bias learns too little"),
    _f("cpu flash: never causal", "sdpa.py", "SdpaCpuFlash", "sdpa_limits.causal_flag(spec),\n            attn_mask", "False,\n            attn_mask", "cpu flash", "keys after the query are seen"),
    _f("cpu flash: no mask", "sdpa.py", "SdpaCpuFlash", "attn_mask=mask,", "attn_mask=None,", "cpu flash", "nothing is masked"),
    _f("cpu flash: a bias needs no gradient", "sdpa.py", "SdpaCpuFlash", "            *sdpa_limits.check_no_bias_gradient(spec),\n", "", "cpu flash", "a bias gets no gradient"),
    _f("kernels take any scale", "sdpa_limits.py", "check_scale", "if spec.score.scale > 0:", "if True:", "limits", "a scale below zero overflows or masks nothing"),
    _f("kernels take a cap", "sdpa_limits.py", "check_softcap", "if isinstance(change, Softcap)", "if False", "limits", "scores are not capped"),
    _f("unusual changes are none", "sdpa_limits.py", "check_known_changes", "if isinstance(change, Unusual)", "if False", "limits", "what has no kind is left out"),
    _f("the weights are read by nobody", "sdpa_limits.py", "check_weights_unread", "if not spec.returns_weights:", "if True:", "limits", "weights that are returned get another gradient"),
    _f("bottom right counts as top left", "sdpa_limits.py", "bottom_right", "return aligned and not dims.same(spec.seqlen_q, spec.seqlen_kv)", "return False", "limits", "a diagonal starts elsewhere"),
    _f("two tensors are one", "sdpa_limits.py", "check_one_tensor", "if spec.mask.dense is None or spec.score.bias is None:", "if True:", "limits", "a mask or a bias is lost"),
]

TRITON = [
    _f("triton: keys beyond the last", "kernels/tile_parts.py", "is_allowed", "allowed = (keys < seqlen_kv) & (queries < seqlen_q)", "allowed = (keys <= seqlen_kv) & (queries < seqlen_q)", "triton", "a key that is none takes part"),
    _f("triton: the band's right edge", "kernels/tile_parts.py", "is_allowed", "keys <= queries + band_right", "keys < queries + band_right", "triton", "the diagonal is shut out"),
    _f("triton: the band's left edge", "kernels/tile_parts.py", "is_allowed", "keys >= queries - band_left", "keys > queries - band_left", "triton", "one key fewer is allowed"),
    _f("triton: intervals include their end", "kernels/tile_parts.py", "is_allowed", "(keys >= lower) & (keys < upper)", "(keys >= lower) & (keys <= upper)", "triton", "one key more is allowed"),
    _f("triton: documents differ", "kernels/tile_parts.py", "is_allowed", "allowed & (document_q == document_k)", "allowed & (document_q >= document_k)", "triton", "queries see earlier documents"),
    _f("triton: no mask tensor", "kernels/tile_parts.py", "is_allowed", "if Mask is not None:", "if False:", "triton", "a dense mask is left out"),
    _f("triton: slopes count from the key", "kernels/tile_parts.py", "change", "(keys - queries).to(tl.float32)", "(queries - keys).to(tl.float32)", "triton", "slopes change their sign"),
    _f("triton: a bias in the wrong unit", "kernels/tile_parts.py", "change", "tl.fma(bias.to(tl.float32), LOG2E, logits)", "logits + bias.to(tl.float32)", "triton", "a bias is added in units of log 2"),
    _f("triton: the cap in the wrong place", "kernels/tile_parts.py", "change", "tanh(qk * (scale / softcap), FAST_TANH)", "tanh(qk * (scale * softcap), FAST_TANH)", "triton", "the cap is another number"),
    _f("triton: distances of other queries", "kernels/tile_parts.py", "load_distances", "first = seqlen_q - 1 - tl.minimum(queries, seqlen_q - 1)", "first = tl.minimum(queries, seqlen_q - 1)", "triton", "what is added is that of the mirrored query"),
    _f("triton: pairs are transposed", "kernels/tile_parts.py", "load_pairs", "found = tl.load(base + rows + keys * stride_k, mask=(keys < seqlen_kv) & (queries < seqlen_q), other=0)", "found = tl.load(base + rows + keys * stride_k, mask=(keys < seqlen_kv - 1) & (queries < seqlen_q), other=0)", "triton", "the last key's element is not read"),
    _f("triton: causal bands are one off", "triton_planning.py", "_band", "return Band(right=0, from_end=from_end)", "return Band(right=1, from_end=from_end)", "triton", "a key after the query is allowed"),
    _f("triton: an offset is left out", "triton_planning.py", "_band", "return Band(right=offset)", "return Band(right=0)", "triton", "keys after the query are shut out"),
    _f("triton: chunks overlap", "triton_planning.py", "_interval", "upper=ix.add(first, Const(size))", "upper=ix.add(first, Const(size + 1))", "triton", "one key more is allowed"),
    _f("triton: a prefix is a minimum", "triton_planning.py", "_interval", "ix.apply(\"max\", ix.add(Q, ix.ONE), length)", "ix.apply(\"min\", ix.add(Q, ix.ONE), length)", "triton", "keys of the prefix are shut out"),
    _f("triton: a last key is one off", "triton_planning.py", "_interval", "return Interval(upper=ix.add(bound, ix.ONE))", "return Interval(upper=bound)", "triton", "the last key is shut out"),
    _f("triton: two intervals are the wider", "triton_planning.py", "both", "_of_two(\"min\", self.upper, other.upper)", "_of_two(\"max\", self.upper, other.upper)", "triton", "of two bounds one is lost"),
    _f("triton: slopes lose the key's factor", "triton_planning.py", "_slopes", "ix.mul(ix.as_float(kind.slopes), Const(float(factor)))", "ix.as_float(kind.slopes)", "triton", "slopes of 2 k are those of k"),
    _f("triton: distances of the batch", "triton_planning.py", "_is_of_distance", "if _mentions(kind.summand, B) or not _mentions(kind.summand, K):", "if False:", "triton", "what depends on more is read by distance"),
    _f("triton: not only of the distance", "triton_planning.py", "_is_of_distance", "return not _mentions(ix.substitute(kind.summand, K, ix.add(K, Q)), Q)", "return True", "triton", "what depends on both positions is read by distance"),
    _f("triton: a mask of proved parts is dropped", "triton_planning.py", "parts", "if scoring is not None and all(added):", "if scoring is not None:", "triton", "a kind that is no part is left out"),
    _f("triton: keys alone", "triton_planning.py", "_is_over_keys", "shape[1] == shape[2] == 1", "shape[1] == 1", "triton", "a mask of queries and keys is one of keys"),
    _f("triton: indices are clamped one short", "expression_nodes.py", "_inside", "return self._call(torch.clamp, position, -size, size - 1)", "return self._call(torch.clamp, position, -size, max(size - 2, 0))", "triton", "the last element of a tensor is not read"),
    _f("triton: distances start elsewhere", "triton_operands.py", "_distance", "first = self._number(operator.sub, 1, queries)", "first = self._number(operator.sub, 0, queries)", "triton", "what is added is that of the distance before"),
    _f("triton: the mask is inverted", "triton_operands.py", "_truth_of_tensor", "self._call(torch.eq, tensor, 0)", "self._call(torch.ne, tensor, 0)", "triton", "an additive mask allows what it shuts out"),
    _f("triton: the divisor of the sink", "kernels/forward.py", "attention_forward", "total = total * decay + tl.exp2(sink - with_sink)", "total = total * decay", "triton", "the sink takes no part"),
    _f("triton: rows begin anew", "kernels/forward.py", "_step", "total = total * decay + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)", "triton", "what was summed before a larger score counts too much"),
]

ALL = [*PLAIN, *TRITON]
