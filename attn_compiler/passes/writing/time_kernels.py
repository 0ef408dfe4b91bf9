"""Lowerings that are timed on this machine, for sites that no measured row covers: the fastest is chosen, once a machine.

Times are kept beside the rewrites (torch_private/store.py), and in this process. A graph's key holds no times: a rewritten graph keeps its
kernels.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
from collections.abc import Mapping

import torch
from torch._subclasses import FakeTensor

from attn_compiler import lowerings
from attn_compiler.lowerings import timed
from attn_compiler.lowerings.base import UNTOUCHED, Lowering
from attn_compiler.options import cache
from attn_compiler.passes.graph import program
from attn_compiler.passes.graph.emit import FakeBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.recovering import recover
from attn_compiler.reasons.decisions import Decision, Evidence
from attn_compiler.spec import reads
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import tracing as torch_tracing
from attn_compiler.torch_private.store import Store

log = logging.getLogger(__name__)

#: the factor by which another lowering has to be faster than the first of the rows
_FASTER = 1.03

#: microseconds by lowering, and the day of the measurement
Measured = tuple[Mapping[str, float], str]
_KNOWN: dict[str, Measured] = {}


def time_kernels(
    unit: Unit, mirror: Mirror, found: FoundSites, targets: Mapping[str, Target], store: Store | None
) -> None:
    """Change the decision of each site where another lowering is faster here, and note the times."""
    options = unit.options
    if not options.time_kernels or options.asked is not None or options.is_context_parallel:
        return
    for site in found.sites:
        spec, decision = site.spec, site.decision
        if spec is None or decision is None or decision.lowering == UNTOUCHED:
            continue
        target = targets[spec.device]
        among = _taking(spec, target, timed.lowerings_for(spec, target, decision.lowering))
        node = mirror.dynamo_node(site.match.out)
        value = None if node is None else node.meta.get("example_value")
        device = value.device if isinstance(value, torch.Tensor) else None
        if len(among) < 2 or device is None or target != Target.current(str(device)):
            continue
        measured = _measured(unit, mirror, site, spec, target, among, device, store)
        if measured is not None:
            _decide(site, spec, target, decision, measured)


def _decide(site: Site, spec: AttentionSpec, target: Target, decision: Decision, measured: Measured) -> None:
    times, since = measured
    order = sorted(times, key=lambda name: times[name])
    if decision.lowering not in times:
        return
    fastest = order[0] if _FASTER * times[order[0]] < times[decision.lowering] else decision.lowering
    said = ", ".join(f"{name} {times[name]:.1f}" for name in order)
    why = f"timed on this GPU as the graph was compiled, in us a call: {said}"
    refusals = tuple(one for one in decision.refusals if one.lowering != fastest)
    site.decision = dataclasses.replace(decision, lowering=fastest, refusals=refusals)
    site.evidence = Evidence(order=tuple(order), why=why, since=since)
    site.estimate = lowerings.estimate(spec, target, fastest)
    site.faster = None if fastest != decision.lowering else site.faster
    site.notes.append(why)


def _taking(spec: AttentionSpec, target: Target, names: tuple[str, ...]) -> tuple[Lowering, ...]:
    """Return the lowerings that take a spec, by all that is known before it runs."""
    taking = (lowerings.by_name(name) for name in names)
    return tuple(
        low
        for low in taking
        if not (
            low.why_not(spec, target)
            or lowerings.check_own_rows(spec, low.name)
            or lowerings.check_scope(spec, low.name)
        )
        and not lowerings.cannot_build(low.name, spec, target)
    )


def _measured(
    unit: Unit,
    mirror: Mirror,
    site: Site,
    spec: AttentionSpec,
    target: Target,
    among: tuple[Lowering, ...],
    device: torch.device,
    store: Store | None,
) -> Measured | None:
    """Return earlier times, or measure now. None where the site can't be timed."""
    try:
        fakes = _fakes(unit, mirror, site, spec)
    except timed.NoValues as error:
        log.debug("the site at %s is not timed: %s", site.module, error)
        return None
    key = _key(spec, target, among, fakes, device)
    known = _KNOWN.get(key) or _read(store, key)
    if known is None:
        try:
            with torch_tracing.for_real():
                times = timed.microseconds(spec, target, among, fakes, device)
        except (timed.NoValues, torch.OutOfMemoryError) as error:
            log.debug("the site at %s is not timed: %s", site.module, error)
            return None
        known = times, datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        if store is not None:
            store.put(key, {"times": dict(times), "since": known[1]})
    _KNOWN[key] = known
    return known


def _read(store: Store | None, key: str) -> Measured | None:
    kept = None if store is None else store.get(key)
    return None if not isinstance(kept, dict) else (kept["times"], kept["since"])


def _fakes(unit: Unit, mirror: Mirror, site: Site, spec: AttentionSpec) -> timed.SiteTensors:
    """Return Dynamo's values of the tensors that lowerings read besides q, k and v. Raises timed.NoValues."""
    builder: FakeBuilder[torch.Tensor] = FakeBuilder(mirror, unit.mode)
    tensors = program.build(mirror, site.match, builder, recover.compute_dtype(site.match))
    loads = {name for kind in spec.mask.conditions for name in reads.tensors(kind)}
    score_loads = {name for kind in spec.score.proved for name in reads.tensors(kind)}
    fakes = timed.SiteTensors(
        mask=tensors.mask,
        sinks=tensors.sinks,
        loads={name: site.loads[name].node.meta["val"] for name in sorted(loads)},
        score_loads={name: site.score_loads[name].node.meta["val"] for name in sorted(score_loads)},
    )
    if not all(map(_is_plain, (*fakes.loads.values(), *fakes.score_loads.values()))):
        raise timed.NoValues("it reads what is no tensor of known sizes")
    return fakes


def _is_plain(value: object) -> bool:
    return isinstance(value, FakeTensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _key(
    spec: AttentionSpec, target: Target, among: tuple[Lowering, ...], fakes: timed.SiteTensors, device: torch.device
) -> str:
    """Return the key of all that the times depend on: the site, the lowerings, our sources, the machine."""

    def of_tensor(x: torch.Tensor | None) -> object:
        return None if x is None else (tuple(x.shape), x.stride(), str(x.dtype))

    tensors = {**fakes.loads, **{f"score {name}": x for name, x in fakes.score_loads.items()}}
    said = (
        "times",
        spec.to_text(),
        [low.name for low in among],
        [(name, of_tensor(x)) for name, x in sorted(tensors.items())],
        (of_tensor(fakes.mask), of_tensor(fakes.sinks)),
        (cache.package_version(), cache.sources_digest(), target.digest(), torch.cuda.get_device_name(device)),
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()
