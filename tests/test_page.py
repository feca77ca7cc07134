"""The status page in a real browser: what a reader sees, by eye, by keyboard and on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import statuses

from pccl.tools import web

STYLE = Path(web.__file__).with_name("page") / "style.css"
READY = "document.querySelectorAll('#group-0 .members tbody tr').length"


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    path = browser.program()
    if path is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    with browser.browsing(path) as made:
        yield made


@pytest.fixture
def master() -> statuses.Master:
    return statuses.Master(statuses.example())


@pytest.fixture
def url(master: statuses.Master) -> Iterator[str]:
    with web.StatusServer(master, "0") as server:
        yield server.url


def test_it_shows_the_run_and_what_is_wrong_with_it(page: browser.Page, url: str) -> None:
    page.open(url)
    page.wait_for(READY)
    text = page.text()
    assert "2 things to look at" in text
    assert "4 members waited 14 s in allreduce #1204 for lagos-laptop (rank 4)" in text
    for words in (
        "8c1f27d90b5ae364",
        "1 h 27 min",
        "198.51.100.7:52114",
        "4 members waiting for it in allreduce #1204, 14 s",
        "draining",
        "cannot reach ohio-trainer, ohio-trainer-2",
        "4 of 5 in, open for 14 s; waiting for lagos-laptop",
        "1.17 GB/s",
        "host_direct up to 512 KiB",
        "1.3 times the lower bound",
        "the master relays between them",
    ):
        assert words in text, words
    rows = page.value("[...document.querySelectorAll('tr.bad .name')].map((one) => one.innerText)")
    assert rows == ["lagos-laptop", "kitchen-pi"]
    assert page.complaints == []


def test_it_follows_the_run(page: browser.Page, url: str, master: statuses.Master) -> None:
    page.open(url)
    page.wait_for(READY)
    master.status = statuses.healthy()
    page.wait_for("document.getElementById('verdict').textContent === 'All is well'")
    assert page.value("document.getElementById('troubles').hidden")
    assert page.value("document.querySelectorAll('tr.bad').length") == 1  # a newcomer
    master.status["groups"] = []
    page.wait_for("!document.getElementById('group-0')")
    assert "Nobody has joined yet" in page.text()


def test_a_master_that_is_away_is_told_and_the_picture_stays(
    page: browser.Page, url: str, master: statuses.Master
) -> None:
    page.open(url)
    page.wait_for(READY)
    master.status = None
    verdict = "document.getElementById('verdict').textContent"
    page.wait_for(f"{verdict}.includes('Connection refused')")
    assert page.value(READY) == 5
    master.status = statuses.healthy()
    page.wait_for(f"{verdict} === 'All is well'")
    page.complaints.clear()  # the browser logs answers such as 503


def test_texts_of_peers_are_text(page: browser.Page, url: str, master: statuses.Master) -> None:
    assert master.status is not None
    group = master.status["groups"][0]
    hostile = statuses.HOSTILE
    group["members"][4].update(name=hostile, address=hostile, software=hostile, replica=hostile)
    group["members"][4]["waits"] = [{"call": hostile, "seconds": 1.0}]
    group["newcomers"][1].update(name=hostile, address=hostile, without=[hostile])
    group["calls"][0].update(call=hostile, what=hostile)
    group["links"][0].update(state=hostile, reason=hostile)
    group["plan"].update(why=hostile)
    group["cause"] = hostile
    master.status.update(run=hostile, software=hostile)
    master.status["events"][0]["text"] = hostile
    page.open(url)
    page.wait_for(f"{READY} && document.body.innerText.includes('<script>alert(1)')")
    assert page.value("document.scripts.length") == 1
    assert page.value("document.images.length") == 0
    assert page.text().count("onerror=alert(2)") >= 10
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_it_fits_its_window(page: browser.Page, url: str, width: int, scheme: str) -> None:
    page.open(url, width, scheme=scheme)
    page.wait_for(READY)
    assert page.value("document.documentElement.scrollWidth") <= width
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")


def test_it_works_without_a_mouse(page: browser.Page, url: str, master: statuses.Master) -> None:
    page.open(url, 390)
    page.wait_for(READY)
    page.press("Tab")
    assert page.value("document.activeElement.id") == "pause"
    page.press("Enter")
    assert page.value("document.activeElement.getAttribute('aria-pressed')") == "true"
    seen = []
    for _ in range(4):
        page.press("Tab")
        focused = "document.activeElement"
        seen.append(page.value(f"{focused}.getAttribute('aria-label') || {focused}.innerText"))
    assert seen == [
        "Rates of the links of group 0",
        "Events, the latest first",
        "status.json",
        "metrics",
    ]
    # It stays as it is until it goes on.
    asked = "performance.getEntriesByType('resource').length"
    before = page.value(asked)
    master.status = statuses.healthy()
    for _ in range(3):
        master.asked.clear()
        assert master.asked.wait(30)
    assert page.value(asked) == before
    assert "things to look at" in page.text()
    page.value("document.getElementById('pause').click()")
    page.wait_for("document.body.innerText.includes('All is well')")


def test_every_table_has_headings_and_every_chart_a_text(page: browser.Page, url: str) -> None:
    page.open(url)
    page.wait_for(READY)
    assert page.value("[...document.querySelectorAll('th')].every((one) => one.scope)")
    assert page.value("[...document.querySelectorAll('svg')].every((one) => one.ariaLabel)")
    assert page.value("document.querySelectorAll('table').length") == 3
    names = "[...document.querySelectorAll('.cards')].map((one) => one.ariaLabel)"
    assert page.value(names) == ["Members of group 0", "Newcomers of group 0"]
    assert page.value("document.documentElement.lang") == "en"
    order = page.value("[...document.querySelectorAll('h1,h2,h3')].map((one) => one.tagName)")
    assert order[0] == "H1" and set(order[1:]) == {"H2", "H3"}


def test_a_page_of_a_run_with_a_secret_asks_for_its_token(
    page: browser.Page, master: statuses.Master
) -> None:
    with web.StatusServer(master, "0", token="5ec2e7") as server:
        page.open(server.url)
        page.wait_for("document.body && document.body.innerText.includes('This run has a secret')")
        page.value("document.querySelector('input').value = '5ec2e7'")
        page.value("document.querySelector('button').click()")
        page.wait_for(READY)
        link = page.value("document.querySelector('footer a').href")
        assert link.endswith("/status.json?token=5ec2e7")
    page.complaints.clear()


def luminance(color: str) -> float:
    """Relative luminance, as of WCAG 2.2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_have_the_contrast_that_text_needs(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)[scheme]
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    pairs = [(text, ground) for text in ("text", "dim", "accent", "bad", "warn")
             for ground in ("card", "ground")]  # fmt: skip
    pairs += [(kind, f"{kind}-ground") for kind in ("good", "bad", "warn")]
    pairs += [("text", "edge"), ("text", "bad-ground"), ("dim", "bad-ground")]
    for text, ground in pairs:
        light, dark = sorted((luminance(colors[text]), luminance(colors[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
