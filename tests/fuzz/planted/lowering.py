"""Faults in what is emitted, and in kernels: plain math, PyTorch's, the reference, Triton's in its interpreter."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
math: the cap only divides
lowerings/shared/parts/score_changes.py _softcap; math: the cap is 1
- call(torch.tanh, call(torch.div, scores, cap)), cap)
+ call(torch.tanh, call(torch.div, scores, cap)), 1.0)

math: strictly causal
lowerings/shared/parts/unused.py _diagonal; math: a query does not see itself
- torch.le,
+ torch.lt,

math: the sink is kept
lowerings/plain/plain_math.py _weights; math: the first key is dropped for the sink
- emitter.call(aten.slice.Tensor, weights, -1, 0, size_of(emitter, scores, 3))
+ emitter.call(aten.slice.Tensor, weights, -1, 1, 9223372036854775807)

math: no sink
lowerings/plain/plain_math.py _weights; math: the sink takes no part
- if sinks is None:
+ if True:

math: heads in the other order
lowerings/plain/plain_math.py _share_rows; math: query heads read other kv heads
- (heads_kv, -1)), 2, 3)
+ (-1, heads_kv)), 1, 2)

math: bool masks are added
lowerings/plain/plain_math.py _masked; math: a mask adds one
- scores = emitter.call(torch.where, mask, scores, -torch.inf)
+ scores = emitter.call(torch.add, scores, mask)

math: masks are subtracted
lowerings/plain/plain_math.py _masked; math: a bias changes its sign
- scores = emitter.call(torch.add, scores, mask)
+ scores = emitter.call(torch.sub, scores, mask)

math: a negative scale is left
lowerings/plain/plain_math.py _scores; math: the largest score is the lowest
- cast(emitter, operands.q, compute), spec.score.scale)
+ cast(emitter, operands.q, compute), abs(spec.score.scale))

reference: no scale in the backward
lowerings/plain/reference.py backward; reference: gradients of q and k are too large
- score_changes.through(grad_logits, scores.changed, spec.score.pointwise) * spec.score.scale
+ score_changes.through(grad_logits, scores.changed, spec.score.pointwise)

reference: the cap's gradient
lowerings/shared/parts/score_changes.py _softcap_slope; reference: gradients are those of uncapped scores
- 1 - (changed / cap).square()
+ torch.ones_like(changed)

reference: no row term
lowerings/plain/reference.py backward; reference: the softmax's own term is left out
- grad_logits = weights * (grad_weights + row)
+ grad_logits = weights * grad_weights

reference: the sink's gradient
lowerings/plain/reference.py _operand_gradients; reference: the sink learns the other way
- gradients.append(grad_sinks.sum((0, 2, 3)))
+ gradients.append(-grad_sinks.sum((0, 2, 3)))

reference: kv heads in the other order
lowerings/plain/reference.py repeated; reference: query heads read other kv heads
- tensor.repeat_interleave(_group(q.shape[1], tensor.shape[1]), dim=1)
+ tensor.repeat(1, _group(q.shape[1], tensor.shape[1]), 1, 1)

reference: gradients of the wrong heads
lowerings/plain/reference.py _folded; reference: gradients of k and v go to other heads
- grad.reshape(batch, heads_kv, _group(grad.shape[1], heads_kv), *grad.shape[2:]).sum(2)
+ grad.reshape(batch, _group(grad.shape[1], heads_kv), heads_kv, *grad.shape[2:]).sum(1)

reference: a bias's gradient is a mean
lowerings/plain/reference.py _operand_gradients; reference: a bias learns too little
- grad_logits.sum_to_size(x.shape)
+ grad_logits.sum_to_size(x.shape) / max(grad_logits.shape[0], 1)

reference: no heads to share
lowerings/plain/reference.py _group; reference: an empty batch in the place of heads is divided by
-  if heads_kv else 1

cpu flash: never causal
lowerings/sdpa/lowering.py SdpaCpuFlash; cpu flash: keys after the query are seen
- limits.causal_flag(spec),
-             attn_mask
+ False,
+             attn_mask

cpu flash: no mask
lowerings/sdpa/lowering.py SdpaCpuFlash; cpu flash: nothing is masked
- attn_mask=mask,
+ attn_mask=None,

cpu flash: a bias needs no gradient
lowerings/sdpa/lowering.py SdpaCpuFlash; cpu flash: a bias gets no gradient
-             *mask_limits.check_no_bias_gradient(spec),

kernels take any scale
lowerings/shared/limits/common.py check_scale; limits: a scale below zero overflows or masks nothing
- if spec.score.scale > 0:
+ if True:

kernels take a cap
lowerings/shared/limits/common.py check_softcap; limits: scores are not capped
- if isinstance(change, Softcap)
+ if False

unusual changes are none
lowerings/shared/limits/common.py check_known_changes; limits: what has no kind is left out
- if not isinstance(change, understood)
+ if False

triton: keys beyond the last
lowerings/shared/kernels/tile_parts.py is_allowed; triton: a key that is none takes part
- allowed = (keys < seqlen_kv) & (queries < seqlen_q)
+ allowed = (keys <= seqlen_kv) & (queries < seqlen_q)

triton: the band's right edge
lowerings/shared/kernels/tile_parts.py is_allowed; triton: the diagonal is shut out
- keys <= queries + band_right
+ keys < queries + band_right

triton: the band's left edge
lowerings/shared/kernels/tile_parts.py is_allowed; triton: one key fewer is allowed
- keys >= queries - band_left
+ keys > queries - band_left

triton: intervals include their end
lowerings/shared/kernels/tile_parts.py is_allowed; triton: one key more is allowed
- (keys >= lower) & (keys < upper)
+ (keys >= lower) & (keys <= upper)

triton: documents differ
lowerings/shared/kernels/tile_parts.py is_allowed; triton: queries see earlier documents
- allowed & (document_q == document_k)
+ allowed & (document_q >= document_k)

triton: no mask tensor
lowerings/shared/kernels/tile_parts.py is_allowed; triton: a dense mask is left out
- if Mask is not None:
+ if False:

triton: slopes count from the key
lowerings/shared/kernels/tile_parts.py change; triton: slopes change their sign
- (keys - queries).to(tl.float32)
+ (queries - keys).to(tl.float32)

triton: a bias in the wrong unit
lowerings/shared/kernels/tile_parts.py change; triton: a bias is added in another unit
- tl.fma(bias.to(tl.float32), UNIT, logits)
+ tl.fma(bias.to(tl.float32), UNIT * LOG2E, logits)

triton: the cap in the wrong place
lowerings/shared/kernels/tile_parts.py changed; triton: the cap is another number
- tanh(qk * (scale / number), FAST_TANH)
+ tanh(qk * (scale * number), FAST_TANH)

triton: distances of other queries
lowerings/shared/kernels/tile_parts.py load_distances; triton: what is added is that of the mirrored query
- first = seqlen_q - 1 - tl.minimum(queries, seqlen_q - 1)
+ first = tl.minimum(queries, seqlen_q - 1)

triton: pairs are transposed
lowerings/shared/kernels/tile_parts.py load_pairs; triton: the last key's element is not read
- found = tl.load(base + rows + columns, mask=(keys < seqlen_kv) & (queries < seqlen_q), other=0)
+ found = tl.load(base + rows + columns, mask=(keys < seqlen_kv - 1) & (queries < seqlen_q), other=0)

triton: causal bands are one off
lowerings/shared/parts/intervals.py band_of; triton: a key after the query is allowed
- return Band(right=0, from_end=from_end)
+ return Band(right=1, from_end=from_end)

triton: an offset is left out
lowerings/shared/parts/intervals.py band_of; triton: keys after the query are shut out
- return Band(right=offset)
+ return Band(right=0)

triton: chunks overlap
lowerings/shared/parts/intervals.py interval_of; triton: one key more is allowed
- upper=ix.add(first, Const(size))
+ upper=ix.add(first, Const(size + 1))

triton: a prefix is a minimum
lowerings/shared/parts/intervals.py interval_of; triton: keys of the prefix are shut out
- ix.apply("max", ix.add(Q, ix.ONE), length)
+ ix.apply("min", ix.add(Q, ix.ONE), length)

triton: a last key is one off
lowerings/shared/parts/intervals.py _of_condition; triton: the last key is shut out
- return Interval(upper=ix.add(times, ix.ONE))
+ return Interval(upper=times)

triton: two intervals are the wider
lowerings/shared/parts/intervals.py both; triton: of two bounds one is lost
- _of_two("min", self.upper, other.upper)
+ _of_two("max", self.upper, other.upper)

triton: slopes lose the key's factor
lowerings/shared/parts/site_parts.py _slopes; triton: slopes of 2 k are those of k
- ix.mul(ix.as_float(kind.slopes), Const(float(factor)))
+ ix.as_float(kind.slopes)

triton: distances of the batch
lowerings/shared/parts/site_parts.py _is_of_distance; triton: what depends on more is read by distance
- if ix.mentions(kind.summand, B) or not ix.mentions(kind.summand, K):
+ if False:

triton: not only of the distance
lowerings/shared/parts/site_parts.py _is_of_distance; triton: what depends on both positions is read by distance
- return not ix.mentions(ix.substitute(kind.summand, K, ix.add(K, Q)), Q)
+ return True

triton: a mask of proved parts is dropped
lowerings/shared/parts/site_parts.py parts; triton: a kind that is no part is left out
- if scoring is not None and all(added):
+ if scoring is not None:

triton: keys alone
lowerings/shared/parts/site_parts.py _is_over_keys; triton: a mask of queries and keys is one of keys
- shape[1] == shape[2] == 1
+ shape[1] == 1

triton: indices are clamped one short
index_expr/on_nodes.py _inside; triton: the last element of a tensor is not read
- return self._call(torch.clamp, position, -size, size - 1)
+ return self._call(torch.clamp, position, -size, max(size - 2, 0))

triton: distances start elsewhere
lowerings/shared/parts/part_tensors.py _distance; triton: what is added is that of the distance before
- first = self._number(operator.sub, 1, queries)
+ first = self._number(operator.sub, 0, queries)

triton: the mask is inverted
lowerings/shared/parts/part_tensors.py _truth_of_tensor; triton: an additive mask allows what it shuts out
- self._call(torch.eq, tensor, 0)
+ self._call(torch.ne, tensor, 0)

triton: the divisor of the sink
lowerings/shared/kernels/forward.py _block; triton: the sink takes no part
- total = total * decay + tl.exp2((sink - shift) * TO_LOG2)
+ total = total * decay

triton: rows begin anew
lowerings/shared/kernels/forward.py _step; triton: what was summed before a larger score counts too much
- total = total * decay + tl.sum(weights, 1)
+ total = total + tl.sum(weights, 1)

keys that nobody sees are not cleared
lowerings/shared/parts/unused.py with_keys_cleared; mask tensors: NaN plus -inf is NaN, where the model replaces it
- operands if seen is None else dataclasses.replace
+ operands if True else dataclasses.replace

a gathered table learns for another row
lowerings/shared/calls/tables.py _sums; score kinds: each pair's gradient goes to another element
- grad.reshape(rows.shape[0], width)).view(size)
+ grad.reshape(rows.shape[0], width).flip(0)).view(size)
""")
