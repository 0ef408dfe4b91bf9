"""The tables of codes of docs/codes.md, and a page for each code, which only the site has."""

from __future__ import annotations

import re
import textwrap

from attn_compiler.reasons.pages import PAGES, SECTIONS, ExampleKind, Page

#: characters of a line of output
_WIDTH = 88
_CODE = re.compile(r"\bAC[1-9]\d\d\b")
_KINDS = {
    ExampleKind.DECISION: "`print(attn_compiler.explain(model, **inputs))` names it below `refused`, for instance:",
    ExampleKind.PROGRAM: "`attn_compiler.explain(model, *inputs)` says so of this program:",
    ExampleKind.RAISES: "This raises it:",
}


def listed() -> str:
    """Each kind with its table."""
    sections = []
    for heading, pages in SECTIONS:
        rows = "\n".join(f"| {page.code} | {page.title} | {_cell(page.remedy)} |" for page in pages)
        sections.append(f"## {heading}\n\n| code | what | what to do |\n| --- | --- | --- |\n{rows}")
    return "\n\n".join(sections)


def page(code: Page, line: str | None) -> str:
    """The page of one code. line: what its example gives."""
    parts = [
        f"# {code.code}: {code.title}",
        code.cause,
        f"## What to do\n\n{code.remedy}",
        "## Example",
        _example(code, line),
    ]
    return "\n\n".join(parts) + "\n"


def _example(code: Page, line: str | None) -> str:
    """What a reader can run, and what it gives. A decision's own example is not for readers: it asks a lowering on a made-up machine."""
    if code.kind is ExampleKind.TOLD:
        return code.example
    said = _KINDS[code.kind]
    if "\noptions = " in code.example:
        said = said.replace("*inputs)", "*inputs, options=options)")
    wrapped = textwrap.fill(line or "", _WIDTH, break_long_words=False, break_on_hyphens=False)
    given = f"```text\n{wrapped}\n```"
    if code.kind is ExampleKind.DECISION:
        return f"{said}\n\n{given}"
    return f"{said}\n\n```python\n{code.example}\n```\n\nIt gives:\n\n{given}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def linked(markdown: str, folder: str, own: str | None = None) -> str:
    """Codes in a page's text as links to their pages, outside of code. folder: from the page to the pages of codes."""
    pieces = re.split(
        r"(^```.*?^```$|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^#[^\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL
    )

    def link(found: re.Match[str]) -> str:
        name = found[0]
        is_known = any(code.value == name for code in PAGES)
        return f"[{name}]({folder}{name}.md)" if is_known and name != own else name

    return "".join(piece if number % 2 else _CODE.sub(link, piece) for number, piece in enumerate(pieces))
