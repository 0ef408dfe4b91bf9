"""A report for people (table, page) and tools (JSON): `Report` of one compiled graph, `Reports` of several.

facts.py has the data, columns.py the facts of each record. publishing.py hands reports out, and keeps the last ones. Rendering is imported
on demand. The JSON has a "version". Keys are only ever added within a version, and every key is always there; an unknown value is null, and
a symbolic size is a string ("s0").
"""

from __future__ import annotations

import html
import json
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from attn_compiler.reasons.errors import ReportNotSaved
from attn_compiler.reporting import wording
from attn_compiler.reporting.columns import as_data
from attn_compiler.reporting.facts import GraphReport

if TYPE_CHECKING:
    from rich.console import RenderableType

JSON_VERSION = 1


class _Outputs(ABC):
    """Base of `Report` and `Reports`: their outputs as text, JSON and a page."""

    __slots__ = ()

    @property
    @abstractmethod
    def _graphs(self) -> tuple[Report, ...]: ...

    @abstractmethod
    def to_dict(self) -> dict[str, Any]: ...

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Return one page that needs no network (docs/reading.md): matches, choices and reasons, with a drawing of each mask."""
        # Imported on demand: nothing else needs it.
        from attn_compiler.reporting.page import page

        return page(self._graphs)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        page = html.escape(self.to_html())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 36em; border: 0"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `to_html`: attn_compiler.reports().save("report.html"). Raises ReportNotSaved."""
        text = self.to_html()
        try:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
        except (OSError, ValueError) as error:
            raise ReportNotSaved(path=os.fspath(path), cause=str(error)) from error

    def __str__(self) -> str:
        from attn_compiler.reporting import render

        return render.plain(render.brief_view(self._graphs))

    def __rich__(self) -> RenderableType:
        from attn_compiler.reporting import render

        return render.brief_view(self._graphs)

    def details(self) -> str:
        """Return all facts as text: operands, formulas, each refusal with its remedy."""
        from attn_compiler.reporting import render

        return render.plain(render.reports_view(self._graphs))


class Report(_Outputs, GraphReport):
    """One graph handed to the backend: the fields of GraphReport. str(report) is a short text, 88 columns wide; rich's print shows it in
    colour; `details()` has everything."""

    __slots__ = ()

    @property
    def _graphs(self) -> tuple[Report, ...]:
        return (self,)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON as nested dicts and lists; the module's docstring says what stays stable."""
        return {"version": JSON_VERSION, **as_data(self)}


class Reports(_Outputs, tuple[Report, ...]):
    """The reports of several graphs, in the order of their compilation: one table, one JSON, with totals."""

    __slots__ = ()

    @property
    def _graphs(self) -> tuple[Report, ...]:
        return self

    @property
    def num_sites(self) -> int:
        return sum(report.num_sites for report in self)

    @property
    def num_misses(self) -> int:
        return sum(report.num_misses for report in self)

    @property
    def num_linear(self) -> int:
        return sum(report.num_linear for report in self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON as Report.to_dict does; "graphs" holds the result of Report.to_dict for each."""
        counts = {"num_sites": self.num_sites, "num_misses": self.num_misses, "num_linear": self.num_linear}
        graphs = [report.to_dict() for report in self]
        return {"version": JSON_VERSION, "num_graphs": len(self), **counts, "graphs": graphs}

    def __repr__(self) -> str:
        return f"<Reports: {wording.totals(self)}; print() shows the table>"
