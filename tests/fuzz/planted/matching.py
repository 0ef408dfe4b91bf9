"""Faults in how attention is matched: views, axes, contractions, steps on the scores, patterns."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, file: str, within: str | None, old: str, new: str, rule: str, why: str) -> Fault:
    return Fault(name=name, file=f"passes/{file}", within=within, old=old, new=new, rule=rule, why=why)


VIEWS = [
    _f("swapped axes of transpose are left", "views.py", "_swap", "out[i], out[j] = out[j], out[i]", "out[i], out[j] = out[i], out[j]", "views", "a transposed operand is read as it was"),
    _f("mT swaps the first two", "views.py", "_last_two", "_swap(dims, -1, -2)", "_swap(dims, 0, 1)", "views", "batch and heads are exchanged"),
    _f("permute the other way round", "views.py", "_permute", "tuple(dims[i] for i in order)", "tuple(dims[order.index(i)] for i in range(len(order)))", "views", "cycles of three axes are turned backwards"),
    _f("movedim to the source", "views.py", "_movedim", "{t % rank: dims[s % rank] for", "{s % rank: dims[t % rank] for", "views", "axes land elsewhere"),
    _f("unsqueeze one too early", "views.py", "_unsqueeze", "(*dims[:at], (), *dims[at:])", "(*dims[: max(at - 1, 0)], (), *dims[max(at - 1, 0) :])", "views", "the new axis stands before another one"),
    _f("repeat_interleave tiles", "views.py", "_repeat_interleave", "(*dims[at], Atom(axes.size_expr(times), broadcast=True))", "(Atom(axes.size_expr(times), broadcast=True), *dims[at])", "views", "query heads read other kv heads"),
    _f("repeat interleaves", "views.py", "_tiled", "(Atom(size, broadcast=True), *dim)", "(*dim, Atom(size, broadcast=True))", "views", "query heads read other kv heads"),
    _f("a slice is a view", "views.py", "_whole", "not same_shape or before.dtype", "before.dtype", "views", "a part of a tensor is read as the whole"),
    _f("a cast is a view", "views.py", "_whole", "before.dtype != after.dtype or ", "", "views", "what was rounded is read unrounded"),
    _f("detach is a view", "views.py", None, "    aten.alias.default: _same,", "    aten.alias.default: _same,\n    aten.detach.default: _same,", "gradients", "a gradient that the model stopped comes back"),
    _f("flip is a view", "views.py", None, "    aten.alias.default: _same,", "    aten.alias.default: _same,\n    aten.flip.default: _same,", "views", "elements come in another order"),
    _f("metadata is asked for by every argument", "views.py", "reads_elements", "asks is None or [i for i, arg in enumerate(user.args) if arg is node] != [asks]", "asks is None and user.target is not torch.ops.aten.sum.default", "readers", "scores that are summed elsewhere are taken away"),
    _f("split puts the inner part first", "axes.py", "split", "self.parts = (Atom(outer, broadcast=self.broadcast), Atom(inner, broadcast=self.broadcast))", "self.parts = (Atom(inner, broadcast=self.broadcast), Atom(outer, broadcast=self.broadcast))", "views", "heads and head dim are exchanged"),
    _f("expand keeps the axis", "axes.py", "expand", "dim if same else (Atom(size, broadcast=True),)", "dim if same else (Atom(size),)", "views", "a repeated axis counts as one of its own"),
    _f("new axes of expand stand last", "axes.py", "expand", "[()] * (len(sizes) - len(dims)) + list(dims)", "list(dims) + [()] * (len(sizes) - len(dims))", "views", "broadcast axes are aligned from the left"),
    _f("regroup loses what is left", "axes.py", "regroup", "if any(atom.size != ONE for atom in queue):", "if False:", "views", "axes get lost"),
    _f("arrange drops the permutation", "arrange.py", "arrange", "if order != sorted(order):", "if order != sorted(order) and len(order) == 4:", "arrange", "axes of three or five dimensions stay where they were"),
    _f("arrange permutes backwards", "arrange.py", "_permutation", "args=(tuple(order),)", "args=(tuple(order.index(i) for i in range(len(order))),)", "arrange", "cycles of axes are turned backwards"),
    _f("arrange broadcasts at the end", "arrange.py", "_insert_broadcasts", "View(function=torch.unsqueeze, args=(index,))", "View(function=torch.unsqueeze, args=(len(sizes) and index - 1,))", "arrange", "a shared axis stands before another one"),
    _f("undone views of other axes", "arrange.py", "_undoes", "return first.args == second.args", "return True", "arrange", "an axis of size one moves"),
    _f("unflatten is undone by any flatten", "arrange.py", "_undoes", "return bool(second.args == (dim, dim + len(sizes) - 1))", "return True", "arrange", "dimensions are merged that were not"),
]

CONTRACTIONS = [
    _f("einsum's left term twice", "contraction.py", "_einsum", "lhs_labels=left, rhs_labels=right", "lhs_labels=left, rhs_labels=tuple(sorted(right))", "contractions", "k's axes are taken in the order of the alphabet"),
    _f("einsum's output sorted", "contraction.py", "_einsum", "out_labels=out)", "out_labels=tuple(sorted(out)))", "contractions", "the scores' axes are taken in another order"),
    _f("baddbmm without beta", "contraction.py", "_baddbmm", "beta=beta,", "beta=1.0,", "contractions", "the addend is not scaled"),
    _f("baddbmm without alpha", "contraction.py", "_baddbmm", "alpha=alpha,", "alpha=1.0,", "contractions", "the scores are not scaled"),
    _f("baddbmm reads with beta 0", "contraction.py", "_baddbmm", "addend if beta != 0 else None", "addend if beta != 0.5 else None", "contractions", "what is added is left out"),
    _f("ellipsis axes from the left", "contraction.py", "_labels", "range(all_dots - own_dots, all_dots)", "range(all_dots - 1, all_dots - own_dots - 1, -1)", "contractions", "batch and heads are exchanged"),
    _f("a label that is summed by itself", "contraction.py", "_einsum", "if (set(left) ^ set(right)) - set(out):", "if False:", "contractions", "what einsum sums is left out"),
    _f("matmul's rows and columns", "contraction.py", "_matmul", "rhs_labels=(*batch[rank - right :], d, n)", "rhs_labels=(*batch[rank - right :], n, d)", "contractions", "k is read transposed"),
    _f("a product of the weights may add", "patterns/softmax_chain.py", "_is_plain", "product.addend is None and product.alpha == 1.0", "True", "contractions", "what the second product adds or scales gets lost"),
    _f("v may contract another axis", "patterns/softmax_chain.py", "_values", "if contracted != list(axes.resolve(key)):", "if False:", "contractions", "a product over the queries counts as one over the keys"),
    _f("softmax over any free axis", "patterns/score_chain.py", "softmax_axis", "key = axes.resolve(scores.dims[dim])", "key = axes.resolve(scores.dims[-1])", "near misses", "a softmax over the queries counts as one over the keys"),
]

STEPS = [
    _f("a scale divides and multiplies alike", "operands.py", None, "    aten.div.Tensor: True,", "    aten.div.Tensor: False,", "score steps", "s / 1.5 is s · 1.5"),
    _f("a scale does not scale what was added", "patterns/score_chain.py", "_scale", "replace(term, weight=term.weight * step.factor)", "replace(term, weight=term.weight)", "score steps", "a bias before a scale is not scaled"),
    _f("a scale before a cap is after it", "patterns/score_chain.py", "_scale", "if scores.capped:", "if not scores.capped:", "score steps", "the cap is another number"),
    _f("tanh after a bias", "patterns/score_chain.py", "_cap", "if scores.additive or scores.keeps or scores.capped or scores.shifted_along:", "if scores.capped:", "score steps", "what was added before the cap is added after it"),
    _f("two caps are one", "patterns/score_chain.py", "_cap", "or scores.capped or", "or", "score steps", "tanh(tanh(s)) is tanh(s)"),
    _f("a shift along any axis", "patterns/score_chain.py", "softmax_axis", "if any(axes.resolve(along) != key for along in scores.shifted_along):", "if False:", "score steps", "a maximum over the queries is left out"),
    _f("sub adds", "patterns/score_steps.py", "_sub", "weight=-alpha", "weight=alpha", "score steps", "a bias is subtracted"),
    _f("alpha is left out", "patterns/score_steps.py", "_add", "term=right, weight=alpha", "term=right, weight=1.0", "score steps", "add(s, m, alpha=0.5) is s + m"),
    _f("the maximum of any axis is shifted by", "patterns/score_steps.py", "_sub", "if maximum is not None and alpha == 1.0:", "if maximum is not None:", "score steps", "what is subtracted twice counts as once"),
    _f("masks the other way round", "patterns/score_steps.py", "condition_of_mask", "return condition, True, top", "return condition, False, top", "masks", "where(c, -inf, 0) allows c"),
    _f("scores may have another reader", "patterns/softmax_chain.py", "_check_readers", "if user not in allowed and views.reads_elements(user, node):", "if False:", "near misses", "a write to the scores by a view is not seen"),
    _f("the weights may be a part", "patterns/softmax_chain.py", "_check_column_dropped", "starts = views.argument(node, \"start\") in (0, None)", "starts = True", "sinks", "w[..., 1:] drops the sink and not the first key"),
    _f("weights are read by nobody", "patterns/softmax_chain.py", "_match", "returns_weights=returned,", "returns_weights=False,", "near misses", "the weights that are returned are those of nobody"),
    _f("sinks after a shift", "patterns/score_chain.py", "_join_sinks", "if scores.shifted_along:", "if False:", "sinks", "a sink beside shifted scores is not shifted"),
    _f("a scale after the sink", "patterns/score_chain.py", "_check_after_sinks", "if not isinstance(step, (score_steps.Cast, score_steps.Floor, score_steps.Shift)):", "if False:", "sinks", "the sink is not scaled"),
    _f("a factor of k is left out", "patterns/softmax_chain.py", "_match", "scores.inner_scale * scores.outer_scale * q_factor * k_factor", "scores.inner_scale * scores.outer_scale * q_factor", "operands", "k * 0.5 is read as k"),
    _f("a call's scale of q is left out", "patterns/sdpa_call.py", "_match", "scale=scale * q_factor * k_factor", "scale=scale * k_factor", "sdpa calls", "q * 0.5 is read as q"),
    _f("is_causal is forgotten", "patterns/sdpa_call.py", "_match", "is_causal=bool(views.argument(anchor, \"is_causal\"))", "is_causal=len(anchor.args) > 5 and bool(anchor.args[5])", "sdpa calls", "a keyword is not read"),
    _f("grouped heads the other way round", "patterns/sdpa_call.py", "_kv_heads", "groups[0]", "groups[0][::-1]", "sdpa calls", "query heads read other kv heads"),
    _f("a call's default scale", "patterns/sdpa_call.py", "_scale", "1.0 / math.sqrt(", "1.0 / (", "sdpa calls", "scores are divided by the head dim"),
    _f("heads that only v shares", "patterns/assembly.py", "_shared_tail", "k.varies_along(atom) or v.varies_along(atom)", "k.varies_along(atom)", "operands", "v is read with fewer heads than it has"),
]

SITES = [
    _f("a root that stops a gradient", "gradients.py", "stops_below", "return known(mirror, root) is True and", "return False and", "gradients", "a gradient that no_grad stopped comes back"),
    _f("a kernel brings a gradient", "lower.py", "_brings_gradient", "any(gradients.known(mirror, node)", "False and any(gradients.known(mirror, node)", "gradients", "an output that is detached wants a gradient"),
    _f("autocast is left where it was entered", "regions.py", "_after", "autocast=region.autocast[:-1]", "autocast=region.autocast", "autocast", "what comes after autocast is traced in its dtypes"),
    _f("autocast is not entered", "regions.py", "active", "for args in self.autocast:", "for args in ():", "autocast", "products are traced in float32"),
    _f("terms are not weighted", "program.py", "_combined", "x if term.weight == 1.0 else", "x if True else", "operands", "a bias that is scaled is added as it is"),
    _f("conditions are not inverted", "program.py", "_combined", "if term.inverted else c", "if False else c", "masks", "masked_fill(c) allows c"),
    _f("only the last condition counts", "program.py", "_combined", "keep = c if keep is None else builder.call(torch.logical_and, keep, c)", "keep = c", "masks", "of two masks one is lost"),
    _f("one condition or the other", "program.py", "_combined", "builder.call(torch.logical_and, keep, c)", "builder.call(torch.logical_or, keep, c)", "masks", "what one mask shuts out the other lets in"),
    _f("a truth value that is added masks", "program.py", "_combined", "x = x if builder.value(x).is_floating_point() else builder.call(torch.Tensor.to, x, dtype)", "x = x", "operands", "s + c shuts out where c is False"),
    _f("masks of other weights are one", "program.py", "_identity", "            t.weight,\n", "", "two sites", "a second site gets the first one's bias"),
    _f("masks of other signs are one", "program.py", "_identity", "            t.inverted,\n", "", "two sites", "a second site gets the first one's mask"),
    _f("masks of other layouts are one", "program.py", "_identity", "            _recipe(match, t).text,\n", "", "two sites", "a second site gets the first one's arrangement"),
    _f("a run-time scale always multiplies", "program.py", "_factored", "operator.truediv if factor.divide else operator.mul", "operator.mul", "score steps", "s / t is s · t"),
    _f("the causal mask of a rectangle is dropped", "recover.py", "_prove", "(proved.is_causal_only and square)", "proved.is_causal_only", "cross", "a diagonal that starts bottom right starts top left"),
    _f("what is added does not count", "meaning.py", "is_causal_only", "return not self.scores and", "return", "score kinds", "a bias beside a causal mask is dropped"),
    _f("nothing is masked, something is added", "meaning.py", "is_everything", "return self.condition == ix.TRUE and not self.scores", "return self.condition == ix.TRUE", "score kinds", "a bias is dropped as a mask that is true everywhere"),
    _f("inverted masks are not", "meaning.py", "mask", "ix.invert(allowed) if term.inverted else allowed", "allowed", "masks", "masked_fill(c) is proved to allow c"),
    _f("rounded conditions are proved", "meaning.py", "mask", "if ix.is_exact(allowed):", "if True:", "rounding", "a comparison of rounded numbers is taken as exact"),
    _f("rounded masks are proved", "meaning.py", "add", "if not ix.is_exact(found.allowed):", "if False:", "rounding", "an additive mask of rounded numbers is taken as exact"),
    _f("strides downstream are never relied on", "strides.py", "relies_on", "if _same_strides(new, old.meta[\"example_value\"]):", "if True:", "strides", "the output has other strides, and a view of it fails"),
    _f("views that are copies now", "strides.py", "_aliases_otherwise", "if bool(before) == bool(now):", "if True:", "strides", "what is written to a view does not reach the output"),
    _f("restride transposes back", "strides.py", "restride", "back = [order.index(i) for i in range(len(order))]", "back = order", "strides", "cycles of axes are turned backwards"),
    _f("keys_last moves nothing back", "keys_last.py", "_move_axis", "back = _call(graph, node, mode, torch.transpose, node, dim, -1)", "back = node", "near misses", "the weights stay transposed"),
]

ALL = [*VIEWS, *CONTRACTIONS, *STEPS, *SITES]
