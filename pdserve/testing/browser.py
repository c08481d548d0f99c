"""A headless Chromium for tests of the live page, where this machine has one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

Scheme = Literal["light", "dark"]

TIMEOUT_MS = 30_000
"""Of every step: the machine may be busy."""

_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def find_chromium() -> str | None:
    """The installed browser; none is ever downloaded."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@contextlib.contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Started once for many pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that was opened, and what went wrong in it."""

    page: Page
    address: str
    problems: list[str] = field(default_factory=list)
    """Errors of scripts, messages of the console, violations of the content security policy among them."""
    outside: list[str] = field(default_factory=list)
    """URLs of requests to anybody but the router."""

    def on_console(self, message: ConsoleMessage) -> None:
        """The page should have nothing to complain about."""
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def on_request(self, request: Request) -> None:
        """The page should talk to its router alone."""
        if not request.url.startswith(f"http://{self.address}/"):
            self.outside.append(request.url)

    def assert_clean(self) -> None:
        """Nothing was complained about, and nobody else was asked for anything."""
        assert self.problems == []
        assert self.outside == []

    def text(self, selector: str) -> str:
        """What is to be read there."""
        return self.page.locator(selector).inner_text()


@contextlib.contextmanager
def visit(
    browser: Browser, address: str, *, width: int = 1440, height: int = 900, scheme: Scheme = "light"
) -> Iterator[Visit]:
    """Open the live page of the router at `address`, host:port."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(TIMEOUT_MS)
    try:
        result = Visit(context.new_page(), address)
        result.page.on("console", result.on_console)
        result.page.on("pageerror", lambda error: result.problems.append(str(error)))
        result.page.on("request", result.on_request)
        result.page.goto(f"http://{address}/dashboard")
        yield result
    finally:
        context.close()
