"""The live page in a real headless Chromium: against fake workers, and against a cluster of real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: dev)")

from playwright.sync_api import Browser, expect

from pdserve.security.api_keys import new_key, write_keys
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.browser import TIMEOUT_MS, Scheme, Visit, chromium, find_chromium, visit
from pdserve.testing.contrast import contrasts
from pdserve.testing.page_rig import PageRig, page_rig
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv

EXECUTABLE = find_chromium()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine (Debian: chromium)")

expect.set_options(timeout=TIMEOUT_MS)

HOSTILE = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script><b>&lt;</b>"""
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
SIZES = [(375, 800), (1440, 900)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert EXECUTABLE is not None
    with chromium(EXECUTABLE) as browser:
        yield browser


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[PageRig]:
    """A prefill and a decode worker, which say what would be an attack if it became markup."""
    with page_rig(tmp_path_factory.mktemp("model"), redis_url, text=HOSTILE) as rig:
        yield rig


def ask(visit: Visit, text: str, *, max_tokens: int = 40) -> None:
    page = visit.page
    page.fill("#prompt", text)
    page.fill("#max-tokens", str(max_tokens))
    page.click("#send")


def wait_cards(visit: Visit, number: int) -> None:
    expect(
        visit.page.locator(".lane-prefill .card[data-state=ready], .lane-decode .card[data-state=ready]")
    ).to_have_count(number)


def test_it_loads_without_errors_and_asks_nobody_but_its_router(browser: Browser, pair: PageRig) -> None:
    with visit(browser, pair.address) as seen:
        wait_cards(seen, 2)
        expect(seen.page.locator("#connection")).to_have_text("live")
        assert seen.text("#model") == "tiny"
        assert [seen.text(f"#{role}-cards .card-name") for role in ("prefill", "decode")] == ["p0", "d0"]
        expect(seen.page.locator("#events")).to_contain_text("d0 is ready")
        seen.assert_clean()


def test_what_a_model_prints_stays_text(browser: Browser, pair: PageRig) -> None:
    with visit(browser, pair.address) as seen:
        wait_cards(seen, 2)
        ask(seen, "<i>Hello</i>", max_tokens=len(HOSTILE))
        expect(seen.page.locator("#answer-state")).to_contain_text("Done")
        assert seen.text("#output") == HOSTILE
        assert seen.page.locator("#output *").count() == 0
        assert seen.page.title() == "pdserve"
        seen.assert_clean()


def test_the_timeline_of_an_answer_is_the_routers(browser: Browser, pair: PageRig) -> None:
    with visit(browser, pair.address) as seen:
        wait_cards(seen, 2)
        ask(seen, "Hello")
        expect(seen.page.locator("#answer-state")).to_have_text("Done (length): prompt by p0, output by d0")
        label = seen.page.get_attribute("#track", "aria-label")
        assert label is not None
        assert re.match(r"Timeline: tokenize .*queue .*decode .*; .* in all", label)
        names = seen.page.locator("#phases dt").all_inner_texts()
        assert {"decode", "TTFT", "TPOT", "tokens"} <= set(names)
        assert seen.page.locator("#phases > div", has_text="tokens").locator("dd").inner_text() == "40"
        expect(seen.page.locator("#figures")).to_contain_text("TTFT p50")
        expect(seen.page.locator("#figures > div", has_text="TTFT p50")).not_to_contain_text("–")


def test_a_request_is_shown_in_each_phase_and_can_be_stopped(browser: Browser, pair: PageRig) -> None:
    prefill, decode = pair.fleet.prefill["p0"], pair.fleet.decode["d0"]
    points = [prefill.before_first_token, prefill.before_hand_off, decode.before_step]
    with visit(browser, pair.address) as seen:
        wait_cards(seen, 2)
        for point in points:
            pair.tell(point.hold)
        try:
            ask(seen, "Hello", max_tokens=3000)
            row, track = seen.page.locator("#requests tr"), seen.page.locator("#track i")
            expect(row).to_contain_text("prefill")
            expect(track.last).to_have_class("phase-prefill")
            expect(seen.page.locator("#output")).to_have_text("")
            pair.tell(points[0].release)
            expect(row).to_contain_text("transfer")
            expect(track.last).to_have_class("phase-transfer")
            expect(seen.page.locator("#wires .on")).to_have_count(1)
            pair.tell(points[1].release)
            expect(row).to_contain_text("decode")
            expect(row).to_contain_text("d0")
            expect(track.last).to_have_class("phase-decode")
            expect(seen.page.locator("#wires .on")).to_have_count(0)
            seen.page.click("#stop")
            expect(seen.page.locator("#answer-state")).to_have_text("Stopped.")
            expect(row).to_have_count(0)
        finally:
            for point in points:
                pair.tell(point.release)
        seen.problems.clear()  # Chromium notes the call that was broken off.


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_can_be_done_by_keyboard(browser: Browser, pair: PageRig, width: int, height: int) -> None:
    with visit(browser, pair.address, width=width, height=height) as seen:
        wait_cards(seen, 2)
        page = seen.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        reached = []
        for _ in range(24):
            page.keyboard.press("Tab")
            active: dict[str, Any] = page.evaluate(
                "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                " const ring = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;"
                " return {id: e.id || e.tagName, ring}; })()"
            )
            if active["id"] == "BODY":
                break
            assert active["ring"], f"{active['id']} shows no focus"
            reached.append(active["id"])
        assert [name for name in reached if name in ("prompt", "max-tokens", "temperature", "send", "output")] == [
            "prompt", "max-tokens", "temperature", "send", "output",
        ]  # fmt: skip
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer-state")).to_contain_text("Done")
        width_needed = page.evaluate("document.documentElement.scrollWidth")
        assert width_needed <= width, "the page scrolls sideways"
        seen.assert_clean()


@pytest.mark.parametrize(("width", "height", "scheme"), [(375, 800, "dark"), (1440, 900, "light"), (1440, 900, "dark")])
def test_text_can_be_read_in_both_schemes(
    browser: Browser, pair: PageRig, width: int, height: int, scheme: Scheme
) -> None:
    """WCAG 2 AA: 4.5:1 for text."""
    with visit(browser, pair.address, width=width, height=height, scheme=scheme) as seen:
        wait_cards(seen, 2)
        ask(seen, "Hello")
        expect(seen.page.locator("#answer-state")).to_contain_text("Done")
        found = contrasts(seen.page)
        assert len(found) > 40
        assert {what: ratio for what, ratio in found.items() if ratio < 4.5} == {}
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in re.findall(r"\d+", background)[:3]) / 3
        assert (bright > 128) is (scheme == "light")


def test_landmarks_headings_and_names_are_there(browser: Browser, pair: PageRig) -> None:
    with visit(browser, pair.address) as seen:
        wait_cards(seen, 2)
        page = seen.page
        for role in ("banner", "main", "contentinfo", "log"):
            assert page.get_by_role(role).count() == 1, role  # type: ignore[arg-type]
        for name in ("Cluster", "Playground", "Last five minutes", "Requests in progress", "Events"):
            assert page.get_by_role("heading", name=name, exact=True).count() == 1
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, a, [role=img]')]"
            ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)"
        )
        assert unnamed == []


def test_sixty_four_workers_fit(browser: Browser, tmp_path: Path, redis_url: str) -> None:
    with page_rig(tmp_path, redis_url, prefill=24, decode=40) as rig, visit(browser, rig.address) as seen:
        wait_cards(seen, 64)
        assert seen.page.evaluate("document.getElementById('topology').offsetHeight") < 900
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 1440
        ask(seen, "Hello")
        expect(seen.page.locator("#answer-state")).to_contain_text("Done")
        seen.assert_clean()


def test_a_worker_that_is_gone_is_shown_as_lost(browser: Browser, tmp_path: Path, redis_url: str) -> None:
    with page_rig(tmp_path, redis_url, decode=2) as rig, visit(browser, rig.address) as seen:
        wait_cards(seen, 3)
        assert seen.page.locator(".kill").count() == 0, "there are no buttons unless they are asked for"
        rig.call(rig.fleet.kill("d1"))
        expect(seen.page.locator("#events")).to_contain_text("d1 is lost")
        ask(seen, "Hello")
        expect(seen.page.locator("#answer-state")).to_contain_text("output by d0")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of the HTTP API of `pdserve up --demo-controls` with two workers of each role."""
    # Slow enough to be watched.
    shape = TinyShape(num_layers=20, hidden_size=256, intermediate_size=1024, max_position_embeddings=4096)
    options = TinyOptions(chat_template=TEMPLATE, eos_tokens=())
    model = make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv", shape=shape, options=options)
    settings = {
        "model.path": model,
        "router.listen": "127.0.0.1:0",
        "router.local_prefill.max_tokens_ahead": 0,
        "local.prefill_workers": 2,
        "local.decode_workers": 2,
        "engine.threads": 1,
        "kv.num_blocks": 1024,
        "health.heartbeat_s": 0.2,
        "decode.speculation.method": "'off'",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    with subprocess.Popen(
        [
            sys.executable, "-m", "pdserve", "up", "--json", "--demo-controls",
            *(f"--set={name}={value}" for name, value in settings.items()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "it did not start"
            yield json.loads(line)["http_address"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.mark.alone
def test_a_kill_and_the_recovery_can_be_watched(browser: Browser, demo: str) -> None:
    with visit(browser, demo) as seen:
        wait_cards(seen, 4)
        page = seen.page
        ask(seen, "Hello", max_tokens=3000)
        row = page.locator("#requests tr")
        expect(row).to_contain_text("decode-")
        victim = row.locator("td").nth(3).inner_text()
        expect(page.locator("#output")).not_to_be_empty()
        before = seen.text("#output")
        page.get_by_role("button", name=f"Kill {victim}").click()
        expect(page.locator("#events")).to_contain_text(f"{victim} is lost")
        expect(page.locator("#events")).to_contain_text("begun again elsewhere (worker_lost)")
        expect(page.locator("#answer-state")).to_contain_text("after 1 lost attempt")
        assert seen.text("#output").startswith(before.rstrip())
        expect(page.locator("#events")).to_contain_text("complete in spite of worker_lost")
        expect(page.locator("#events")).to_contain_text(f"{victim} is ready again")
        wait_cards(seen, 4)
        seen.assert_clean()


def test_a_key_that_is_asked_for_stays_in_memory(browser: Browser, tmp_path: Path, redis_url: str) -> None:
    keys = tmp_path / "keys.yaml"
    entry, key = new_key("page", None)
    write_keys(keys, [entry])
    with (
        page_rig(tmp_path, redis_url, prefill=0, decode=0, keys_file=str(keys)) as rig,
        visit(browser, rig.address) as seen,
    ):
        page = seen.page
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The router does not know this key.")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#router-cards .card-state")).to_have_text("no workers")
        expect(page.locator("#key-dialog")).to_be_hidden()
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert key not in page.evaluate(stored)
        page.reload()
        expect(page.locator("#key-dialog")).to_be_visible()
