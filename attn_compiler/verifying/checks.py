"""One comparison for one site."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from attn_compiler.passes.graph.site import Site
from attn_compiler.verifying import masks, outputs, scores, shared, site_gradients
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.shared import SharedSite
from attn_compiler.verifying.values import Body, Key, NoValueError, Values


@dataclass(kw_only=True, eq=False)
class Check:
    """subject: as in Verification. new_out: the node of the site's output in the rewritten graph, if it was rewritten. shared: the site, if
    its keys are on several ranks. needs: values to record first. skipped: why it can't be compared, if so."""

    subject: str
    site: Site
    body: Body
    new_out: fx.Node | None = None
    shared: SharedSite | None = None
    needs: set[Key] = field(default_factory=set)
    skipped: str | None = None

    @property
    def is_as_it_was(self) -> bool:
        """True if the site was left as the model made it."""
        return self.shared is None and (self.site.spec is None or self.site.decision is None or self.new_out is None)

    @property
    def formula(self) -> str | None:
        """The recovered mask or bias, for people."""
        if self.subject == "mask" and self.site.condition is not None:
            return masks.formula(self.site)
        return scores.words(self.site) if self.subject == "bias" else None

    def find_needs(self, values: Values) -> None:
        """Find the values to record by a rehearsal."""
        try:
            self.needs = values.needs(self._read)
        except NoValueError as error:
            self.skipped = str(error)

    def _read(self, values: Values) -> None:
        if self.subject == "mask":
            masks.read(self.site, values)
        elif self.subject == "bias":
            scores.read(self.site, values)
        elif self.subject == "gradient":
            site_gradients.read(self.site, self.body, self.new_out, values)
        elif self.shared is not None:
            shared.read(self.shared, values)
        else:
            outputs.read(self.site, self.body, self.new_out, values)

    def compared(self, values: Values) -> Compared:
        """Compare a site in one process, but for gradients. Raises VerificationMismatch, or NoValueError."""
        if self.subject == "mask":
            return masks.check_mask(self.site, values)
        if self.subject == "bias":
            return scores.check_biases(self.site, values)
        if self.new_out is None:
            raise NoValueError("the site is as the model made it")
        return outputs.check_output(self.site, self.body, self.new_out, values)
