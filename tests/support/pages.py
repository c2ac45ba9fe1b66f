"""Pages of `shrinkpoint report`: runs that need no training, a page's text and tables, and a browser that measures it."""

import html
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.store.run import RunStore

REQUIRED = "SHRINKPOINT_REQUIRE_BROWSER"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip


def noted(at: int, **more: Any) -> dict[str, Any]:
    """What a save's manifest says, in numbers that differ from save to save."""
    return {
        "raw_bytes": 4000 + at % 7,
        "scheme": "auto",
        "configuration": f"scale={0.5 / (1 + at // 400)}",
        "reason": "it is within the allowed cost",
        "measured": "measured",
        "degradation": 1e-5 * (at % 13),
        "degradation_low": -1e-5,
        "degradation_high": 2e-4,
        "allowed": 5e-4,
        "cost_high": 5.2e-3,
        "blocked_s": 0.25,
        "search_s": 0.5,
        "encode_s": 1.0,
        "baseline": 5 / (1 + at / 100),
        "metrics": {"val_loss": 5 / (1 + at / 100), "lr": 1e-3},
        **more,
    }


def commit_run(url: str, saves: Sequence[Mapping[str, Any]]) -> RunStore:
    """A run of one base for each save, steps 10, 20, ...; its containers are no containers."""
    store = RunStore(url)
    with store.writer() as writer:
        for at, save in enumerate(saves):
            container = bytes(100 + at * 37 % 101)
            writer.commit(
                container,
                step=10 * (at + 1),
                kind="base",
                parent=None,
                state_digest="",
                meta={"save": dict(save)},
            )
    return store


class Page(HTMLParser):
    """A page's tags with their attributes, its words outside of style and script, and its tables by the headings above them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._title = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self._title = "" if tag == "h3" else self._title
        if tag == "tr":
            self.tables.setdefault(self._title, []).append([])
        if tag in ("td", "th"):
            self.tables[self._title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self._open):
            return
        self.words += f" {data}"
        if self._open[-1:] == ["h3"]:
            self._title += data
        if {"td", "th"} & set(self._open):
            self.tables[self._title][-1][-1] += data


def browser() -> str:
    """Return the program of a Chromium; the test is skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        assert not os.environ.get(REQUIRED), f"{REQUIRED} is set, and there is no Chromium"
        pytest.skip("there is no Chromium")
    return found


_MEASURE = """
<script>
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(each => each.open = true);
  document.querySelectorAll('th button')[1].click();
  const root = document.documentElement, small = [], wide = [];
  document.querySelectorAll('body *').forEach(each => {
    const words = [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (words && parseFloat(getComputedStyle(each).fontSize) < 12) small.push(each.className || each.tagName);
    const box = each.getBoundingClientRect();
    if (!each.closest('.scroll') && box.right > root.clientWidth + 0.5) wide.push(each.className || each.tagName);
  });
  parent.document.title = JSON.stringify({width: root.clientWidth, scroll: root.scrollWidth, small, wide,
    sorted: document.querySelectorAll('th[aria-sort]').length,
    readouts: [...document.querySelectorAll('output')].filter(each => each.textContent).length});
});
</script>
"""


def look(page: Path, width: int, folder: Path, *, measured: bool) -> tuple[str, list[str]]:
    """Open a page in a browser window of this width.

    Args:
        page: the file.
        width: in pixels.
        folder: for the browser's own files.
        measured: whether it measures itself, which its policy of content forbids: the copy that is opened has none.

    Returns:
        The page's title then, and what its console said.
    """
    text = page.read_text(encoding="utf-8")
    if measured:
        free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        framed = html.escape(free.replace("</body>", f"{_MEASURE}</body>"))
        # a frame, since no window of the browser is narrower than 500
        text = f'<title></title><iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{framed}"></iframe>'
    opened = folder / f"{measured}-{width}.html"
    opened.write_text(text, encoding="utf-8")
    own = [f"--user-data-dir={folder / f'{measured}-{width}'}", f"--window-size={width},900"]
    done = subprocess.run(
        [browser(), *_FLAGS, *own, "--dump-dom", opened.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    return html.unescape(title[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line]
