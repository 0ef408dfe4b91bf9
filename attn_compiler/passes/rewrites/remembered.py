"""Lookup and keeping of a rewrite (attn_compiler/rewrites): before the passes, which then need not run, and after them.

`verify` and `dump_dir` want the passes to run, so nothing is looked up with them.

These graphs are not kept, and the report says why:
- a graph without a key
- a graph that padding is to be taken out of (`unpad`)
- a graph that holds tensors from call to call (delayed FP8 scaling)
- a graph in which something failed, or whose first choice could not be built
- a graph whose masks have more meanings than its function has code for
A rewrite whose kernels this process can't build is not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from attn_compiler import lowerings
from attn_compiler.options.options import Options
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.rewrites import border_records, key, record
from attn_compiler.passes.rewrites.border_records import Crossing
from attn_compiler.passes.rewrites.key import Keyed
from attn_compiler.passes.rewrites.record import Edit
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.reasons import decisions
from attn_compiler.reasons.errors import described
from attn_compiler.reporting import facts
from attn_compiler.reporting.report import Report
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe, tracing as torch_tracing
from attn_compiler.torch_private.known_masks import Known
from attn_compiler.torch_private.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFile:
    """One file: the edits, the report, and the knowledge told to other graphs.

    guards: on symbolic sizes, taken by the passes. known: a digest of what was known of those sizes after that.
    """

    edits: tuple[Edit, ...]
    report: Report
    crossing: Crossing
    guards: tuple[Any, ...]
    known: str | None


_CODEC = AttentionSpec.codec.extended(
    KeptFile,
    *record.PARTS,
    *border_records.PARTS,
    *(Report, facts.SiteReport, facts.MissReport, facts.LinearReport, LinearSpec, LinearForm),
    *(decisions.Reason, decisions.Refusal, decisions.Decision, decisions.Copy),
    *(decisions.Evidence, decisions.Estimate, decisions.Faster),
)


@dataclass(kw_only=True)
class Remembered:
    """The lookup of one graph, before anything of it is rewritten.

    keyed: None if the graph has no key. why_not: the reason for that.
    """

    gm: fx.GraphModule
    border: Border
    store: Store
    options: Options
    keyed: Keyed | None = None
    why_not: str | None = None

    def find(self) -> KeptFile | None:
        """Return the kept file of the same graph, or None."""
        if self.keyed is None or self.options.verify or self.options.dump_dir is not None:
            return None
        data = self.store.get(self.keyed.text)
        try:
            kept = None if data is None else _CODEC.from_data(data)
            return kept if isinstance(kept, KeptFile) and self._may_be_done(kept) else None
        except Exception as error:
            if torch_compat.starts_over(error):
                raise
            # The passes run, and report what is wrong with a file or a kernel.
            log.debug("ignored what was kept of graph %s: %s", torch_compat.graph_name(), described(error))
            return None

    def _may_be_done(self, kept: KeptFile) -> bool:
        """Return whether this process can build the chosen kernels, which are built then, and may rely on what the passes relied on."""
        for site in kept.report.sites:
            if lowerings.cannot_repeat(site.decision.lowering, site.spec, Target.current(site.spec.device)):
                return False
        if self.keyed is None or not self.keyed.values.sizes.hold(kept.guards):
            return False
        return border_records.may_be_told(kept.crossing, self.keyed.modules[0].nodes)

    def apply(self, kept: KeptFile) -> Report:
        """Repeat the edits, and tell other graphs the same. May raise any exception for a file that this package did not write."""
        if self.keyed is None:
            raise Unkeyed("the graph has no key")
        module = self.keyed.modules[0]
        mode = torch_tracing.fake_mode_of_values(value for one in self.keyed.modules for value in one.values)
        if kept.edits and mode is None:
            raise Unkeyed("the graph has no fake values")
        self.keyed.values.sizes.take(kept.guards, kept.known)
        if mode is not None:
            record.apply(self.keyed, kept.edits, mode)
        if self.options.check_invariants:
            for one in self.keyed.modules:
                one.graph_module.graph.lint()
        border_records.tell_again(kept.crossing, self.border, module.nodes, module.values)
        name, model = torch_compat.graph_name(), torch_observe.model_name()
        return dataclasses.replace(kept.report, graph=name, model=model, from_cache=True)

    def keep(self, told: Report, known: Sequence[tuple[int, Known]], units: Iterable[Unit]) -> Report:
        """Keep the passes' edits, and return the report, which says why if that can't be done. units: of the passes."""
        with _unkeyed(self):
            if self.keyed is None:
                raise Unkeyed(self.why_not or "it has no key")
            if told.faults or told.failure or any(unit.log.unread for unit in units):
                raise Unkeyed("something failed, and may not fail again")
            unbuilt = {r.lowering for site in told.sites for r in site.decision.refusals if r.when_built}
            if unbuilt:
                raise Unkeyed(f"{', '.join(sorted(unbuilt))} could not be built, and may be built another time")
            module = self.keyed.modules[0]
            if not border_records.was_heard(module.nodes):
                raise Unkeyed(
                    "what is known of an input was not relied on, since the function has code for other meanings"
                )
            kept = KeptFile(
                edits=record.record_edits(self.keyed),
                report=dataclasses.replace(told, graph="", seconds=()),
                crossing=border_records.record_crossing(self.border, known, module.nodes, module.values),
                guards=self.keyed.values.sizes.taken(),
                known=self.keyed.values.sizes.known(),
            )
            self.store.put(self.keyed.text, _CODEC.data(kept))
        if self.why_not is not None:
            log.debug("what was made of graph %s is not kept: %s", told.graph, self.why_not)
        return dataclasses.replace(told, not_kept=self.why_not)


def begin(gm: fx.GraphModule, options: Options, border: Border, store: Store) -> Remembered:
    """Make the key of a graph, before anything of it is rewritten."""
    memory = Remembered(gm=gm, border=border, store=store, options=options)
    with _unkeyed(memory):
        if options.packs:
            raise Unkeyed("tokens are packed (unpad, share_prefix), by a graph that is more than edits of the model's")
        if options.is_context_parallel:
            raise Unkeyed("attention is rewritten for a sequence that ranks share (context_parallel)")
        memory.keyed = key.make_key(gm, options, border_records.input_knowledge(gm, border))
    return memory


@contextlib.contextmanager
def _unkeyed(memory: Remembered) -> Iterator[None]:
    """Take an exception of the block as the reason why the rewrite is not kept. A fault is logged, or raised with options.strict."""
    try:
        yield
    except Unkeyed as error:
        memory.keyed, memory.why_not = None, str(error)
    except Exception as error:
        if torch_compat.starts_over(error) or memory.options.strict:
            raise
        memory.keyed, memory.why_not = None, f"keeping it failed: {described(error)}"
        log.warning("a rewrite is not kept for the next process: %s", described(error))
