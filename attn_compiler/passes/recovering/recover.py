"""Turn a match into an AttentionSpec. Operands are built on fake tensors, so shapes, strides and dtypes are those that a kernel sees.

The mask is read as a condition over (b, h, q, k) (meaning.py). A mask that allows every pair is dropped, and a causal mask becomes the
kernels' own `is_causal`. Any other mask stays one dense tensor that combines all added and masking terms. Its spec has the mask kinds that
were proved, or the reason why the mask could not be read.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Literal

import torch

from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph import axes, emit, faults, program, saved
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.emit import FakeBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.program import Tensors
from attn_compiler.passes.graph.site import COMES_IN, Keyless, Latent, Match, Miss, Operand, Site, SiteReads, Term
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.recovering import highest, latent, meaning, packing, reach, stored, upcasts
from attn_compiler.passes.recovering.meaning import Meaning
from attn_compiler.passes.recovering.reading import Reader
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.spec import dims, masks, reads, scores
from attn_compiler.spec.attention import AttentionSpec, Dim, LatentSpec, LseUse, SizeRange, StoredSpec, TensorSpec
from attn_compiler.torch_private import frames as torch_frames, symbols as torch_symbols

#: note on such a mask where transformers batches requests and pages its cache
OF_REQUESTS = (
    "the mask keeps apart the requests of a batch: transformers' continuous batching writes it anew for each batch, in Python, "
    "to one tensor, so that each query reads the keys of all requests (with attn_implementation='flash_attention_2' those of its own)"
)
#: arguments of an attention there, beside its mask
_PAGED = ("read_index", "write_index")

#: hint for reproducing an exception that was caught
_REPRODUCE = "compile with options={'strict': True}, which raises it"


def recover_specs(unit: Unit, mirror: Mirror, found: FoundSites, readers: Readers) -> FoundSites:
    """Give every site its spec. A site whose operands can't be arranged becomes a miss."""
    kept: list[Site] = []
    misses = list(found.misses)
    builder: FakeBuilder[torch.Tensor] = FakeBuilder(mirror, unit.mode)
    reader, latents = readers.of(unit), latent.Finder(mirror)
    unreadable: dict[str, list[str]] = {}
    for site in found.sites:
        unit.log.current = site.module
        reason: Reason | None = None
        with faults.confined(unit.log, "recover", site.module) as attempt:
            reason = _described(unit, mirror, site, builder, reader, latents, unreadable)
        reason = attempt.reason or reason
        if reason is None:
            kept.append(site)
        else:
            match = site.match
            misses.append(Miss(anchor=match.anchor, nearest=match.pattern, stopped_at=match.out, reason=reason))
    unit.log.unread.extend(unreadable)
    for cause, modules in unreadable.items():
        warnings.warn(
            f"attn_compiler could not read the mask at {', '.join(dict.fromkeys(modules))}, which stays a dense tensor there: {cause}. "
            f"To reproduce: {_REPRODUCE}",
            AttnCompilerWarning,
            stacklevel=2,
        )
    return dataclasses.replace(found, sites=tuple(kept), misses=tuple(misses))


def _described(
    unit: Unit,
    mirror: Mirror,
    site: Site,
    builder: FakeBuilder[torch.Tensor],
    reader: Reader,
    latents: latent.Finder,
    unreadable: dict[str, list[str]],
) -> Reason | None:
    """Describe the site. Return the reason if that is not possible."""
    try:
        _describe(unit, mirror, site, builder, reader, latents, unreadable)
    except AxisError as error:
        rule = "q, k, v and the mask can be brought into (batch, heads, sequence, head dim)"
        return Reason(code=Code.AXES, rule=rule, observed=str(error))
    if site.match.lse is not None and site.keyless is not None:
        rule = "a query whose logsumexp is read has no keys only where they are masked by -inf"
        return Reason(code=Code.KEYLESS_ROWS, rule=rule, observed="a mask shuts queries out with a finite number")
    return None


def compute_dtype(match: Match) -> torch.dtype:
    """Return the kernel's dtype of q and k: `SiteReads.narrow`, or that of the model's product (autocast included)."""
    if match.reads.narrow is not None:
        return match.reads.narrow
    value = match.first.meta["val"]
    dtype: torch.dtype = value.dtype
    return dtype


def _describe(
    unit: Unit,
    mirror: Mirror,
    site: Site,
    builder: FakeBuilder[torch.Tensor],
    reader: Reader,
    latents: latent.Finder,
    unreadable: dict[str, list[str]],
) -> None:
    """Fill in the spec and the meaning of the mask. Remove a mask that the kernel needs no tensor for. Raises AxisError.

    unreadable: exceptions that kept masks from being read, with the masks' modules. New ones are added.
    """
    match = site.match
    out = emit.example(mirror, match.out)
    needs_grad = bool(out.requires_grad)
    bias = needs_grad and any(emit.example(mirror, t.operand.root).requires_grad for t in match.scores.additive)
    if needs_grad:
        saved.record_copies(unit, mirror, match)
    site.added, site.allowed = match.scores.additive, match.scores.allowed
    proved = _read(unit, mirror, site, reader, unreadable)
    _prove(match, proved, bias)
    site.condition, site.loads, site.score_loads = proved.condition, reader.tensors, proved.tensors
    site.keyless = proved.keyless
    if not needs_grad:
        match.reads = SiteReads(narrow=upcasts.read_through(mirror, match), stored=stored.find(mirror, match))
    match.reads = dataclasses.replace(match.reads, latent=latents.find(match))
    tensors = program.build(mirror, match, builder, compute_dtype(match))
    mask, score = _mask_spec(match, tensors, proved, bias), _score_spec(mirror, match, tensors, proved, bias)
    if (mask.reason or mask.added) and score.bias is None:
        by_zero = not needs_grad and highest.leaves_zeros(mirror, match, reader)
        if by_zero or highest.leaves_keys(mirror, match, reader):
            mask, score = (
                dataclasses.replace(mask, reason=None, added=None),
                dataclasses.replace(score, by_highest=True),
            )
        if by_zero:
            site.keyless = Keyless(allowed=None, highest=-math.inf, through=True, by_tensor=True)
    spec = AttentionSpec(
        q=_tensor_spec(tensors.q, emit.example(mirror, match.q.root)),
        k=_tensor_spec(tensors.k, emit.example(mirror, match.k.root)),
        v=_tensor_spec(tensors.v, emit.example(mirror, match.v.root)),
        mask=dataclasses.replace(mask, out_of_reach=reach.missing(unit, mirror, match, site.loads, mask.conditions)),
        score=dataclasses.replace(
            score, out_of_reach=reach.missing(unit, mirror, match, site.score_loads, score.proved)
        ),
        device=out.device.type,
        out_dtype=_name(out.dtype),
        needs_grad=needs_grad,
        returns_weights=match.returns_weights,
        decomposed=match.decomposed,
        stored=_stored_spec(match, tensors),
        latent=_latent_spec(match, tensors),
        no_latent=match.reads.latent if isinstance(match.reads.latent, Reason) else None,
        lse=_lse_use(mirror, match),
        of_bfloat16=needs_grad and upcasts.holds_bfloat16(mirror, match),
        scope=None if match.scope is None else tuple(sorted(match.scope)),
        ranges=_ranges(tensors.q.shape[0], tensors.q.shape[2], tensors.k.shape[2]),
    )
    site.spec = _with_own_rows(match, spec, site.keyless)


def _with_own_rows(match: Match, spec: AttentionSpec, keyless: Keyless | None) -> AttentionSpec:
    """Set `own_rows` in the spec if rows of queries without keys can't be completed behind any kernel."""
    if keyless is None or (keyless.own is None and _why_not_completed(match, spec, keyless) is None):
        return spec
    rows: Literal["numbers", "model"] = "numbers" if is_added_up(match, spec) else "model"
    return dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, own_rows=rows))


def _why_not_completed(match: Match, spec: AttentionSpec, keyless: Keyless) -> str | None:
    if keyless.numbers is not None and not _is_at_hand(spec, keyless.numbers):
        return "the numbers that mask are out of reach"
    if not (keyless.through and spec.needs_grad):
        return None
    if keyless.numbers is not None or keyless.partly or match.scores.limits:
        return "the scores have a gradient where all are masked"
    return None


def _is_at_hand(spec: AttentionSpec, numbers: Expr) -> bool:
    """True if the site has all tensors and sizes that the numbers read: its own sizes, and whatever its mask kinds read."""
    if spec.mask.out_of_reach:
        return False
    own = frozenset(str(size) for size in (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv))
    return reads.names_in(numbers) <= own.union(*(reads.names(kind) for kind in spec.mask.conditions))


def is_added_up(match: Match, spec: AttentionSpec) -> bool:
    """True if all masks are in one tensor of numbers, which is added as the model adds it."""
    tensor = spec.mask.dense or spec.score.bias
    return tensor is not None and tensor.dtype != "bool" and not match.scores.allowed and not match.scores.limits


def _lse_use(mirror: Mirror, match: Match) -> LseUse:
    if match.lse is None:
        return "unread"
    if not emit.example(mirror, match.lse.node).requires_grad:
        return "read"
    return "merged" if match.lse.is_part else "differentiated"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(sizes: torch.Size | tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(torch_symbols.dim_of(s) for s in sizes)


def _ranges(*sizes: int | torch.SymInt) -> tuple[SizeRange, ...]:
    """Return ranges of symbolic batch and lengths whose guards say more than their names do. Guard that no size is 0."""
    found = {}
    for size in sizes:
        torch_symbols.ask_for_some(size)
        dim = torch_symbols.dim_of(size)
        least, most = torch_symbols.range_of(size)
        if isinstance(dim, str) and (least > dims.at_least(dim) or most is not None):
            found[dim] = SizeRange(size=dim, least=least, most=most)
    return tuple(found.values())


def _tensor_spec(value: torch.Tensor, root: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        shape=_dims(value.shape),
        strides=_dims(value.stride()),
        dtype=_name(value.dtype),
        requires_grad=bool(root.requires_grad),
    )


def _stored_spec(match: Match, tensors: Tensors[torch.Tensor]) -> StoredSpec | None:
    if match.reads.stored is None or tensors.stored is None:
        return None
    k, v = match.reads.stored
    return StoredSpec(
        k=_tensor_spec(tensors.stored.k, tensors.stored.k),
        v=_tensor_spec(tensors.stored.v, tensors.stored.v),
        k_scaled=k.scale is not None,
        v_scaled=v.scale is not None,
    )


def _latent_spec(match: Match, tensors: Tensors[torch.Tensor]) -> LatentSpec | None:
    found, made = match.reads.latent, tensors.latent
    if not isinstance(found, Latent) or made is None:
        return None
    return LatentSpec(
        latent=_tensor_spec(made.latent, made.latent),
        rope=None if made.rope is None else _tensor_spec(made.rope, made.rope),
        nope=found.k.size,
        nope_first=found.nope_first,
    )


def _read(unit: Unit, mirror: Mirror, site: Site, reader: Reader, unreadable: dict[str, list[str]]) -> Meaning:
    """Read the masks and biases, and note conditions that were left out. After an exception this mask alone stays dense."""
    match = site.match
    is_masked = bool(match.scores.terms)
    try:
        proved = meaning.of(mirror, match, reader)
        if proved.reason is not None and not unit.is_body and _masks_come_in(mirror, match):
            match.notes = (*match.notes, OF_REQUESTS if torch_frames.was_given(*_PAGED) else COMES_IN)
        if is_masked and proved.reason is None:
            match.notes = (*match.notes, *packing.notes(match.scores.terms, reader, proved.words))
    except Exception as error:  # If reading a mask fails in any way, its tensor is still available.
        if unit.options.strict:
            raise
        cause = f"{type(error).__name__}: {error}"
        unreadable.setdefault(cause, []).append(site.module)
        return meaning.unread(match, f"reading it failed with {cause} ({_REPRODUCE})")
    return proved if is_masked else Meaning(unusual=proved.unusual)


def _masks_come_in(mirror: Mirror, match: Match) -> bool:
    """True if a graph input is used as a mask. An added input counts if it has no gradient and is the same for all heads, as masks are."""
    return any(_comes_in(mirror, term) for term in match.scores.allowed) or any(
        _comes_in(mirror, term) and _is_like_a_mask(emit.example(mirror, term.operand.root))
        for term in match.scores.additive
    )


def _comes_in(mirror: Mirror, term: Term) -> bool:
    return term.operand.root.op == "placeholder" and emit.example(mirror, term.operand.root).dim() > 1


def _is_like_a_mask(numbers: torch.Tensor) -> bool:
    of_all_heads = numbers.dim() == 2 or (numbers.dim() == 4 and torch_symbols.statically_known(numbers.shape[1] == 1))
    return of_all_heads and not numbers.requires_grad and not torch_symbols.statically_known(numbers.shape[-2] == 1)


def _prove(match: Match, proved: Meaning, bias: bool) -> None:
    """Remove a mask that allows every pair, or that `is_causal` expresses. Else record the indices that each term depends on.

    bias: an added tensor requires a gradient, so the tensors always stay.
    """
    changes = (*match.scores.changes, *(scores.Unusual(what=what) for what in proved.unusual))
    match.scores = dataclasses.replace(match.scores, changes=changes)
    if bias or not match.scores.terms:
        return
    along = iter(proved.along)
    match.scores = dataclasses.replace(
        match.scores,
        additive=tuple(dataclasses.replace(term, along=next(along)) for term in match.scores.additive),
        allowed=tuple(dataclasses.replace(term, along=next(along)) for term in match.scores.allowed),
    )
    square = axes.same_size(axes.dim_size(match.axes.query), axes.dim_size(match.axes.key))
    if proved.is_everything or (proved.is_causal_only and square):
        is_causal = match.scores.is_causal or proved.is_causal_only
        match.scores = dataclasses.replace(match.scores, is_causal=is_causal, additive=(), allowed=())
        match.notes = (*match.notes, f"the mask tensor is not needed: it is {proved.words}")


def _mask_spec(match: Match, tensors: Tensors[torch.Tensor], proved: Meaning, bias: bool) -> masks.MaskSpec:
    dense = None
    if tensors.mask is not None and not bias:
        terms = len(match.scores.additive) + len(match.scores.allowed)
        dense = masks.Dense(shape=_dims(tensors.mask.shape), dtype=_name(tensors.mask.dtype), terms=terms)
    spec = masks.MaskSpec(kinds=proved.kinds, dense=dense, reason=proved.reason)
    if dense is not None:
        spec = dataclasses.replace(spec, added=proved.added, rest=proved.rest, chosen=proved.chosen)
    if not match.scores.is_causal:
        return spec
    if tensors.mask is None and proved.kinds:
        return dataclasses.replace(spec, flag=masks.Flag.READ)
    return dataclasses.replace(spec, kinds=(masks.Causal(), *proved.kinds), flag=masks.Flag.CALLED)


def _score_spec(
    mirror: Mirror, match: Match, tensors: Tensors[torch.Tensor], proved: Meaning, bias: bool
) -> scores.ScoreSpec:
    changes = list(match.scores.changes)
    if tensors.mask is not None and bias:
        changes.append(scores.DenseBias(shape=_dims(tensors.mask.shape), dtype=_name(tensors.mask.dtype)))
    if match.scores.sinks is not None:
        root = match.scores.sinks.root if isinstance(match.scores.sinks, Operand) else None
        changes.append(scores.Sinks(requires_grad=root is not None and emit.example(mirror, root).requires_grad))
    return scores.ScoreSpec(
        scale=match.scores.scale,
        runtime_scale=bool(match.scores.factors),
        changes=tuple(changes),
        dropout_p=match.scores.dropout_p,
        softmax_dtype=match.scores.softmax_dtype,
        proved=proved.scores,
    )
