"""Faults in what is a site: steps on scores, softmaxes, calls, operands, strides, gradients."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a scale divides and multiplies alike
passes/matching/operands.py; score steps: s / 1.5 is s · 1.5
- aten.div_.Tensor), True),
+ aten.div_.Tensor), False),

a scale does not scale what was added
passes/matching/patterns/score_chain.py _scale; score steps: a bias before a scale is not scaled
- weight=x.weight * factor
+ weight=x.weight

a scale after a cap leaves the cap
passes/matching/patterns/score_chain.py _scale; score steps: the cap is another number
- c.scaled(factor) if isinstance(c, Pointwise) else c
+ c

tanh after a bias
passes/matching/patterns/score_chain.py _change; score steps: what was added before the cap is added after it
- if scores.additive or scores.keeps or scores.is_changed or scores.shifted_along or scores.is_offset:
+ if scores.is_changed:

two caps are one
passes/matching/patterns/score_chain.py _change; score steps: tanh(tanh(s)) is tanh(s)
- scores.changes.append(step.change)
+ scores.changes[:] = [step.change]

a shift along any axis
passes/matching/patterns/score_chain.py softmax_axis; score steps: a maximum over the queries is left out
- if any(axes.resolve(along) != key for along in scores.shifted_along):
+ if False:

sub adds
passes/matching/patterns/score_steps.py _sub; score steps: a bias is subtracted
- weight=-alpha
+ weight=alpha

alpha is left out
passes/matching/patterns/score_steps.py _add; score steps: add(s, m, alpha=0.5) is s + m
- term=right, weight=alpha
+ term=right, weight=1.0

the maximum of any axis is shifted by
passes/matching/patterns/score_steps.py _row_maximum; score steps: a maximum over the queries is left out
- keeps != unsqueezed and [d % (last + 1) for d in dims] == [last]
+ keeps != unsqueezed

weights are masked by any mask
passes/matching/patterns/weights_chain.py _again; several masks: a mask that the weights alone have is left out
- _is_same(mirror, _bare(mirror, kept.node, kept.inverted, kept.used), wanted)
+ True

a mask on the weights may be written before
passes/matching/patterns/weights_chain.py _bare; masks written: the mask that sets weights to zero is another one by then
- return mutation.version(mirror, condition, mirror.order(reader)), inverted
+ return mutation.version(mirror, condition, 0), inverted

a negation is none
passes/matching/patterns/weights_chain.py _bare; several masks: weights are set to zero where the scores were kept
- inverted ^= condition.target in _NOT
+ inverted ^= False

a factor is read where the kernel stands
passes/matching/patterns/softmax_chain.py _factor; score steps: a factor that is written after it was multiplied counts as it is then
- used=scaled.used, until=out
+ used=out, until=out

a divisor is a factor
passes/graph/program.py _factored; score steps: scores are multiplied where the model divides
- operator.truediv if factor.divide else operator.mul
+ operator.mul

subtracted scores are added
passes/matching/patterns/score_chain.py _apply; score steps: bias - scores is read as bias + scores
- _scale(scores, step, -1.0)
+ _scale(scores, step, 1.0)

a bias is scaled in its own dtype
passes/graph/program.py _weighted; score steps: a bias in half precision overflows or loses digits beside scores in float32
- not _is_exact_in_every_dtype(term.weight)
+ False

masks the other way round
passes/matching/patterns/softmax_chain.py condition_of_mask; masks: where(c, -inf, 0) allows c
- inverted=True, fill=yes * term.weight
+ inverted=False, fill=yes * term.weight

scores may have another reader
passes/matching/patterns/softmax_chain.py _check_readers; near misses: a write to the scores by a view is not seen
- if joins or not is_cheap:
+ if False:

the weights may be a part
passes/matching/patterns/weights_chain.py _check_column_dropped; sinks: w[..., 1:] drops the sink and not the first key
- begins = start == (axes.ONE if scores.sinks_first else axes.size_expr(0))
+ begins = True

sinks after a shift
passes/matching/patterns/score_chain.py _join_sinks; sinks: a sink beside shifted scores is not shifted
- if scores.shifted_along:
+ if False:

a scale after the sink
passes/matching/patterns/score_chain.py _check_after_sinks; sinks: the sink is not scaled
- if not isinstance(step, (steps.Cast, steps.Clamp, steps.Shift, steps.Offset)):
+ if False:

a factor of k is left out
passes/matching/patterns/softmax_chain.py _match; operands: k * 0.5 is read as k
- scores.scale * q_factor * k_factor
+ scores.scale * q_factor

a call's scale of q is left out
passes/matching/patterns/sdpa_call.py _match; sdpa calls: q * 0.5 is read as q
- scale=scale * q_factor * k_factor
+ scale=scale * k_factor

is_causal of grouped heads is forgotten
passes/matching/patterns/sdpa_call.py _match; sdpa calls: a query sees later keys
- is_causal=bool(views.argument(anchor, "is_causal"))
+ is_causal=bool(views.argument(anchor, "is_causal")) and not gqa

grouped heads the other way round
passes/matching/patterns/sdpa_call.py _kv_heads; sdpa calls: query heads read other kv heads
- (size, quotient))[0]
+ (quotient, size))[1]

a call's default scale
passes/matching/patterns/sdpa_call.py _scale; sdpa calls: scores are divided by the head dim
- 1.0 / math.sqrt(
+ 1.0 / (

copies that are written are read above
passes/matching/operands.py _is_readable; roots: k.clone() that is written to is read as k
-  and not any(rewritten)

a root that stops a gradient
passes/graph/gradients.py stops_below; gradients: a gradient that no_grad stopped comes back
- return carries(mirror, root) is True and
+ return False and

a kernel brings a gradient
passes/writing/lower.py _brings_gradient; gradients: an output that is detached wants a gradient
- any(gradients.carries(mirror, node)
+ False and any(gradients.carries(mirror, node)

operands are saved as they are
passes/graph/program.py _operand; roots: a backward reads what was written to since
- held = builder.hold(root, _version(mirror, match, operand), operand=name, why=operand.kept)
+ held = root

the output stays in the kernel's dtype
passes/writing/lower.py _as_was; halves: what was float32 comes out in bfloat16
- if builder.value(new).dtype != wanted.dtype:
+ if False:

terms are not weighted
passes/graph/program.py _weighted; operands: a bias that is scaled is added as it is
- if term.weight == 1.0:
+ if True:

conditions are not inverted
passes/graph/program.py _combined; masks: masked_fill(c) allows c
- if term.inverted else c
+ if False else c

only the last condition counts
passes/graph/program.py _combined; masks: of two masks one is lost
- keep = c if keep is None else builder.call(torch.logical_and, keep, c)
+ keep = c

one condition or the other
passes/graph/program.py _combined; masks: what one mask shuts out the other lets in
- builder.call(torch.logical_and, keep, c)
+ builder.call(torch.logical_or, keep, c)

a truth value that is added masks
passes/graph/program.py _combined; operands: s + c shuts out where c is False
- x = x if builder.value(x).is_floating_point() else builder.call(torch.Tensor.to, x, dtype)
+ x = x

masks of other weights are one
passes/graph/program.py _identity; two sites: a second site gets the first one's bias
- t.weight, t.weighed_in
+ t.weighed_in

masks of other signs are one
passes/graph/program.py _identity; two sites: a second site gets the first one's mask
- t.inverted, t.along
+ t.along

masks of other layouts are one
passes/graph/program.py _identity; two sites: a second site gets the first one's arrangement
- t.along, _recipe(match, t).text
+ t.along

a run-time scale always multiplies
passes/graph/program.py _factored; score steps: s / t is s · t
- operator.truediv if factor.divide else operator.mul
+ operator.mul

the causal mask of a rectangle is dropped
passes/recovering/recover.py _prove; cross: a diagonal that starts bottom right starts top left
- (proved.is_causal_only and square)
+ proved.is_causal_only

what is added does not count
passes/recovering/meaning.py is_causal_only; score kinds: a bias beside a causal mask is dropped
- return not self.scores and
+ return

nothing is masked, something is added
passes/recovering/meaning.py is_everything; score kinds: a bias is dropped as a mask that is true everywhere
- return self.condition == ix.TRUE and not self.scores
+ return self.condition == ix.TRUE

inverted masks are not
passes/recovering/meaning.py mask; masks: masked_fill(c) is proved to allow c
- ix.invert(allowed) if term.inverted else allowed
+ allowed

rounded conditions are proved
passes/recovering/meaning.py mask; rounding: a comparison of rounded numbers is taken as exact
- if ix.is_exact(allowed):
+ if True:

rounded masks are proved
passes/recovering/meaning.py _why_rounded; rounding: an additive mask of rounded numbers is taken as exact
- if not ix.is_exact(found.allowed):
+ if False:

strides downstream are never relied on
passes/graph/strides.py relies_on; strides: the output has other strides, and a view of it fails
- if same(new, old.meta["example_value"]):
+ if True:

views that are copies now
passes/graph/strides.py _aliases_otherwise; strides: what is written to a view does not reach the output
- if bool(before) == bool(now):
+ if True:

restride transposes back
passes/graph/strides.py restride; strides: cycles of axes are turned backwards
- back = [own.index(i) for i in range(len(own))]
+ back = list(own)

keys_last moves nothing back
passes/spelling/keys_last.py _with_keys_last; near misses: the weights stay transposed
- return F.softmax(scores.transpose(dim, -1), -1, dtype=dtype).transpose(dim, -1).contiguous()
+ return F.softmax(scores.transpose(dim, -1), -1, dtype=dtype).contiguous()
""")
