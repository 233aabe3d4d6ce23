"""The documentation site, built strictly and read in a real browser at the width of a phone."""

from __future__ import annotations

import html
import json
import posixpath
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import paceline

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
pytestmark = pytest.mark.skipif(find_spec("zensical") is None, reason="Zensical is not installed: pip install .[docs]")

# Loads each page in a frame of 390 pixels, then types into the search of the last one.
LOOK = """
<body><script>
const seen = { pages: {}, hosts: [] }, pages = PAGES;
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
async function open(page) {
  const frame = Object.assign(document.createElement("iframe"), { src: page, width: 390, height: 800 });
  const loaded = new Promise((done) => frame.onload = done);
  document.body.append(frame);
  await loaded;
  return frame;
}
async function find(frame, words) {
  const inside = frame.contentDocument;
  inside.querySelector(".md-search__button").click();
  for (let turn = 0; turn < 1000; turn++) {
    await wait(100);
    const root = [...inside.querySelectorAll("*")].map((each) => each.shadowRoot).find((each) => each);
    const input = root?.querySelector("input");
    if (!input) continue;
    if (input.value != words) {
      input.value = words;
      input.dispatchEvent(new frame.contentWindow.Event("input", { bubbles: true }));
    }
    const hits = [...root.querySelectorAll("a")].map((link) => link.href);
    if (hits.some((hit) => hit.includes("configuration.html"))) return hits;
  }
  return [];
}
async function look() {
  for (const page of pages) {
    const frame = await open(page), inside = frame.contentDocument;
    seen.pages[page] = {
      wider: inside.documentElement.scrollWidth - 390,
      tabs: [...inside.querySelectorAll(".md-nav--primary > .md-nav__list > .md-nav__item")].length,
      missing: [...inside.images].filter((image) => !image.naturalWidth).map((image) => image.src),
    };
    const loaded = frame.contentWindow.performance.getEntriesByType("resource").map((entry) => new URL(entry.name));
    seen.hosts.push(...loaded.filter((url) => url.protocol != "data:").map((url) => url.host));
    if (page == pages.at(-1)) seen.hits = await find(frame, "shard_optimizer");
    frame.remove();
  }
  seen.hosts = [...new Set(seen.hosts)];
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
}
look();
</script></body>
"""


class Links(HTMLParser):
    """The addresses in a page, those of what the browser loads with it, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loaded += [found[name] for name in ("src", "href") if name in found and tag != "a"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built by `make docs` from a copy; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, folder)
    folder.joinpath("src").symlink_to(ROOT / "src")
    ended = subprocess.run(
        ["make", "--old-file", "setup", "docs", f"VENV={sys.prefix}"], cwd=folder, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "site"


def pages_of(built: Path) -> list[str]:
    """The paths of all pages in the site; 404.html is only shown by a server."""
    paths = [path.relative_to(built).as_posix() for path in built.rglob("*.html")]
    return sorted(path for path in paths if path not in ("404.html", "look.html"))


def test_every_page_and_notebook_is_in_the_navigation() -> None:
    def leaves(part: Any) -> list[str]:
        parts = part.values() if isinstance(part, dict) else part
        return [part] if isinstance(part, str) else [leaf for each in parts for leaf in leaves(each)]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert sorted(leaves(nav)) == sorted([*pages, *notebooks])


def test_no_page_has_a_broken_link_or_loads_from_another_host(built: Path) -> None:
    pages = {page: Links(built.joinpath(page).read_text(encoding="utf-8")) for page in pages_of(built)}
    broken = []
    for name, page in pages.items():
        for link in [*page.links, *page.loaded]:
            to = urlsplit(link)
            if to.scheme:
                assert link not in page.loaded, f"{name} loads {link}"
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(to.path))) if to.path else name
            has_place = not to.fragment or target not in pages or unquote(to.fragment) in pages[target].ids
            if not built.joinpath(target).exists() or not has_place:
                broken.append(f"{name}: {link}")
    assert broken == []


def test_every_public_name_is_in_the_reference(built: Path) -> None:
    ids = Links(built.joinpath("api.html").read_text(encoding="utf-8")).ids
    assert {f"paceline.{name}" for name in paceline.__all__} - ids == set()


@pytest.fixture
def address(built: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@needs_browser
def test_pages_fit_a_phone_load_nothing_from_other_hosts_and_are_searched(
    built: Path, address: str, tmp_path: Path
) -> None:
    pages = pages_of(built)
    built.joinpath("look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
            "--enable-logging=stderr", "--virtual-time-budget=200000", "--dump-dom", f"http://{address}/look.html",
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout)[0]))
    assert list(seen["pages"]) == pages
    for page, facts in seen["pages"].items():
        assert facts["wider"] <= 0, page
        assert facts["missing"] == [], page
        assert facts["tabs"] == 5, page  # home, tutorials, how-to guides, reference, explanation
    assert seen["hosts"] == [address]
    assert any("configuration.html" in hit for hit in seen["hits"])
