"""Open every page of the built site in headless Chromium, on a wide and on a narrow screen.

    make docs-check

A page must log no error, miss no image and not scroll sideways, and a search for GSAM must find its
page. Chromium is the system's own (Debian: apt-get install chromium).
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1280, 375)
SEARCHED, FOUND = "GSAM", "reference/objectives.html"
MISSING_IMAGES = """async () => {
    const images = [...document.images];
    for (const image of images) { image.loading = "eager"; await image.decode().catch(() => {}); }
    return images.filter(image => !image.naturalWidth).map(image => image.src);
}"""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Keep requests out of the output."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine."""
    handler = partial(_Handler, directory=str(folder))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def faults(page: Page, url: str) -> list[str]:
    """Return what is wrong with a page."""
    found: list[str] = []
    page.on("console", lambda m: found.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on("requestfailed", lambda request: found.append(f"not loaded: {request.url}"))
    page.goto(url, wait_until="load")
    found += [f"missing image: {source}" for source in page.evaluate(MISSING_IMAGES)]
    if (beyond := page.evaluate(SIDEWAYS)) > 0:
        found.append(f"scrolls sideways by {beyond} px")
    return found


def searched(page: Page, site: str) -> list[str]:
    """Return what is wrong with the search."""
    page.goto(f"{site}/search.html?q={SEARCHED}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("document.querySelector('.search-summary')?.innerText.includes('found')")
    links = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    if any(FOUND in link for link in links):
        return []
    return [f"search for {SEARCHED}: {FOUND} is not among {len(links)} results"]


def commit() -> str:
    """Return the commit that the site was built from, with a + where files have changed."""
    command = ("git", "describe", "--always", "--abbrev=7", "--dirty=+")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Check the site, print a line for each page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder of the built site")
    parser.add_argument("--record", type=Path, help="a file to write the result to as well")
    args = parser.parse_args()
    folder = args.site
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("chromium must be installed, got none. Run apt-get install chromium.")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    lines, num_faults = [], 0
    with served(folder) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        lines.append(f"{date.today()}, commit {commit()}, Chromium {browser.version}")
        for width in WIDTHS:
            context = browser.new_context(viewport={"width": width, "height": 800})
            results = {}
            for name in names:
                page = context.new_page()
                results[name] = faults(page, f"{site}/{name}")
                page.close()
            results[f"search for {SEARCHED}"] = searched(context.new_page(), site)
            for name, found in results.items():
                lines.append(f"{width:5} px  {name:30} {'; '.join(found) or 'ok'}")
            num_faults += sum(map(len, results.values()))
        browser.close()
    lines.append(f"{len(names)} pages, {len(WIDTHS)} widths, {num_faults} faults")
    print("\n".join(lines))
    if args.record is not None:
        args.record.write_text("\n".join(lines) + "\n")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
