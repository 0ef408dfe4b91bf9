"""What mkdocs calls: tables and generated pages come in, links out of docs/ lead into the site, and codes lead to their pages."""

from __future__ import annotations

import posixpath
import warnings
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attn_compiler.reasons.pages import PAGES
from website import codes, links, plots, results, tables

ROOT = Path(__file__).parents[1]
#: (path, title, what it says) of each page, for llms.txt
_listed: list[tuple[str, str, str]] = []


def on_files(files: Files, *, config: Any) -> Files:
    """Add what is no file of docs/."""
    _listed.clear()
    tables.made.cache_clear()
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for path in _copied(files):
        files.append(File.generated(config, links.copy_of(path), content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def generated() -> dict[str, str]:
    """The pages and plots that no file of docs/ has, by their paths in the site."""
    # Imported late: with it comes torch.
    from website import examples

    made = {inside: (ROOT / outside).read_text(encoding="utf-8") for outside, inside in links.OUTSIDE.items()}
    made |= plots.files() | results.pages()
    with warnings.catch_warnings():
        # Some examples do what PyTorch warns of.
        warnings.simplefilter("ignore")
        made |= {f"codes/{page.code}.md": codes.page(page, examples.own_line(page)) for page in PAGES.values()}
    return made


def _copied(files: Files) -> list[str]:
    """The CSVs, scripts, sources and tests that pages link to, by their paths in the repository."""
    found: set[str] = set()
    for file in files.documentation_pages():
        targets = (each[1] for each in links.LINK.finditer(tables.placed(file.content_string)))
        found |= {path for target in targets if (path := links.in_repository(target, file.src_uri)) is not None}
    return sorted(path for path in found if path.startswith(links.COPIED) and (ROOT / path).is_file())


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Mend links, and make codes links."""
    here = page.file.src_uri
    up = posixpath.relpath("codes", posixpath.dirname(here) or ".")
    text = plots.placed(links.mended(tables.placed(markdown), here), here)
    text = codes.linked(text, f"{up}/", own=Path(here).stem)
    title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), here)
    _listed.append((page.url or "index.html", title, links.first_sentence(text)))
    return text


def on_post_build(*, config: Any) -> None:
    """llms.txt: every page, with its first sentence."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    lines += [f"- [{title}]({url}): {words}" for url, title, words in sorted(_listed)]
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
