"""A page in a real headless Chromium, and the data that a page carries."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def embedded(path):
    """Return the data in the file of a page."""
    element = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(element, path.read_text(encoding="utf-8"), re.DOTALL)[1])


def references(path):
    """Return what the file of a page would load: addresses, and files in attributes and CSS."""
    text = path.read_text(encoding="utf-8")
    loads = r'https?:[^\s"]*|\b(?:src|href)="(?!data:)[^"]*|url\([^)]*|@import[^;]*|\bfetch\('
    return re.findall(loads, text)


@contextmanager
def opened(path, **options):
    """Open a page, fail for every message on its console; skip without playwright or Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the path")
    messages = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.as_uri())
        yield page
        browser.close()
    assert not messages


def colours_of(page, selector):
    """Return how many colours the pixels of a canvas have."""
    return page.evaluate(
        """(selector) => {
            const canvas = document.querySelector(selector);
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        selector,
    )
