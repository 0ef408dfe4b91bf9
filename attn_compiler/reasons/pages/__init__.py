"""What each code means, why it is given and what to do: `PAGES`, and `page_of`. Data that imports neither torch nor the passes."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages import choices, dtensors, errors, faults, machine, misses, padding, scores, tensors
from attn_compiler.reasons.pages.page import ExampleKind, Page

__all__ = ["PAGES", "SECTIONS", "ExampleKind", "Page", "page_of"]

#: (heading, pages), in the order of the codes
SECTIONS: tuple[tuple[str, tuple[Page, ...]], ...] = (
    ("The machine and its libraries", machine.PAGES),
    ("q, k and v", tensors.PAGES),
    ("Masks and scores", scores.PAGES),
    ("What was asked for, and what is faster", choices.PAGES),
    ("Attention that was not found", misses.PAGES),
    ("Padding that stays", padding.PAGES),
    ("DTensors", dtensors.PAGES),
    ("Faults", faults.PAGES),
    ("Errors", errors.PAGES),
)
PAGES: dict[Code, Page] = {page.code: page for _, pages in SECTIONS for page in pages}


def page_of(text: str) -> Page | None:
    """The page of "AC201", in any case; None if there is no such code."""
    try:
        return PAGES[Code(text.upper())]
    except ValueError:
        return None
