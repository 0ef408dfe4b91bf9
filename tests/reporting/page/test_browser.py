"""The page in Chromium: what a browser makes of it. Skipped where there is none (Debian's package is called chromium)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.reporting.page import page
from attn_compiler.reporting.report import Reports
from tests.reporting.making import REPORT, hostile
from tests.reporting.page.reading import read

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
).split()

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no Chromium on PATH (looked for {', '.join(_NAMES)})")

#: put at the end of a page whose policy is taken away
_MEASURE = """<script>
const html = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
const wide = (one) => [one.getBoundingClientRect().left, one.getBoundingClientRect().right];
const [summary] = all("summary"), [drawing] = all("svg.mask");
summary.focus();
const seen = {
  overflow: html.scrollWidth - html.clientWidth,
  beyond: all("body *").filter((one) => !one.closest(".wide, pre, svg, .skip") && wide(one)[1] > html.clientWidth + 1).length,
  background: getComputedStyle(document.body).backgroundColor,
  drawing: [drawing.getBoundingClientRect().width, drawing.getBoundingClientRect().height],
  letters: parseFloat(getComputedStyle(all("svg.mask text")[0]).fontSize) * drawing.getScreenCTM().a,
  filled: ["skipped", "taking", "fully", "partly"].map((name) => getComputedStyle(all("svg.mask ." + name)[0]).fill),
  hatched: document.querySelector("#hatch").getBoundingClientRect !== undefined,
  focused: document.activeElement === summary,
  closed: all("details").filter((one) => !one.open).length,
  tabbed: all(".wide").every((one) => one.tabIndex === 0),
};
html.dataset.seen = JSON.stringify(seen);
</script>"""


def _run(folder: Path, text: str, *flags: str) -> str:
    """What Chromium writes to stdout for a page."""
    assert BROWSER is not None
    (folder / "page.html").write_text(text, encoding="utf-8")
    command = [BROWSER, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8")


def _measured(folder: Path, *flags: str) -> dict[str, Any]:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page((REPORT,)))
    found = read_attribute(_run(folder, text.replace("</body>", f"{_MEASURE}</body>"), "--dump-dom", *flags))
    seen: dict[str, Any] = json.loads(found)
    return seen


def read_attribute(dom: str) -> str:
    """What the script of a measured page wrote."""
    value = read(re.sub(r"<script>.*?</script>", "", dom, flags=re.DOTALL)).one("html").attributes["data-seen"]
    assert value is not None
    return value


def test_no_name_of_a_model_becomes_markup(tmp_path: Path) -> None:
    root = read(_run(tmp_path, page(Reports((hostile(), REPORT))), "--dump-dom"))
    assert root.one("head").one("title").text == "attn_compiler report"
    assert root.all("script") == root.all("img") == []


def test_such_a_name_would_be_seen(tmp_path: Path) -> None:
    """The test above can fail: what is not escaped is run."""
    text = "<!DOCTYPE html><html><head><title>mine</title></head><body><script>document.title='taken'</script></body></html>"
    assert read(_run(tmp_path, text, "--dump-dom")).one("title").text == "taken"


def test_the_policy_stops_a_script(tmp_path: Path) -> None:
    """If something were not escaped after all."""
    text = page((REPORT,)).replace("</body>", "<script>document.title='taken'</script></body>")
    assert read(_run(tmp_path, text, "--dump-dom")).one("head").one("title").text == "attn_compiler report"


@pytest.mark.parametrize("width", [1280, 800, 500])
def test_it_fits_the_window(tmp_path: Path, width: int) -> None:
    seen = _measured(tmp_path, f"--window-size={width},900")
    assert (seen["overflow"], seen["beyond"]) == (0, 0)
    across, down = seen["drawing"]
    assert 250 <= across <= 500
    assert 250 <= down <= 500
    assert seen["letters"] >= 9.5


def test_it_works_by_keys(tmp_path: Path) -> None:
    seen = _measured(tmp_path)
    assert seen["focused"]
    assert seen["tabbed"]
    assert seen["closed"] >= 3


@pytest.mark.parametrize(
    ("scheme", "background"), [(1, "rgb(255, 255, 255)"), (0, "rgb(17, 21, 26)")], ids=["light", "dark"]
)
def test_light_and_dark(tmp_path: Path, scheme: int, background: str) -> None:
    seen = _measured(tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert seen["background"] == background
    assert len(set(seen["filled"])) == 4
    assert seen["filled"][3] == 'url("#hatch")'


def test_it_prints(tmp_path: Path) -> None:
    _run(tmp_path, page((REPORT,)), f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
