"""The explorer page: its arithmetic against `theory` in node, its behaviour in a headless Chromium."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import theory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explorer.html"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
RTOL = 1e-12  # two implementations of sin, cos and atan2, and a few hundred roundings


def arithmetic() -> str:
    return re.search(r'<script id="arithmetic">(.*?)</script>', PAGE.read_text(), flags=re.DOTALL).group(1)


def in_node(calls: list[tuple]) -> list:
    """The results of calls (name, *arguments) of the page's functions."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    code = arithmetic() + (
        "\nconst calls = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "\nconst functions = { stepAngle, normAfter, adjacentCosine, evolve, alignment, logMoment, massLowerBound,"
        " attentionMass };"
        "\nconsole.log(JSON.stringify(calls.map(([name, ...rest]) => functions[name](...rest))));"
    )
    done = subprocess.run(["node", "-e", code], input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SIZES = np.array([0.01, 0.3, 1.0, 1.08, 7.5, 39.96, 300.0])
ANGLES = np.radians([1, 30, 71.34, 89.999, 90, 90.001, 120, 150, 179])
GRID = [tuple(map(float, point)) for point in np.array(np.meshgrid(SIZES, SIZES, ANGLES)).reshape(3, -1).T]


@pytest.mark.parametrize(
    ("name", "reference"),
    [("stepAngle", theory.step_angle), ("normAfter", theory.norm_after), ("adjacentCosine", theory.adjacent_cosine)],
)
def test_one_step_is_theorys(name, reference):
    got = np.array(in_node([(name, *point) for point in GRID]))
    expected = reference(*np.array(GRID).T)
    np.testing.assert_allclose(got, expected, rtol=RTOL, atol=1e-15 if name == "adjacentCosine" else 0)


@pytest.mark.parametrize("layers", [1, 32, 64])
def test_many_layers_are_theorys(layers):
    points = GRID[::7]
    for (n, C, phi), got in zip(points, in_node([("evolve", *point, layers) for point in points]), strict=True):
        path = theory.evolve(n, np.full(layers, C), np.full(layers, phi))
        np.testing.assert_allclose(got["norms"], path.norms, rtol=1e-10)
        np.testing.assert_allclose(got["turns"], path.turns, rtol=1e-9)
        np.testing.assert_allclose(got["cosines"], np.cos(path.turns), rtol=0, atol=1e-10)


def test_attention_is_theorys():
    moments = [(lam, d) for lam in (0.5, 8.0, 20.0, 40.0) for d in (2, 64, 128, 1024)]
    got = in_node([("logMoment", *point) for point in moments])
    np.testing.assert_allclose(got, [theory.log_moment(*point) for point in moments], rtol=1e-11)
    masses = [(S, 128, 576, lam) for S in (-0.5, 0.0, 0.2, 0.6, 1.0) for lam in (1.0, 20.0)]
    got = in_node([("massLowerBound", *point) for point in masses])
    np.testing.assert_allclose(got, [theory.mass_bounds(*point).lower for point in masses], rtol=1e-11)


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.95])
def test_the_attention_curve_is_theorys(drift, cosine):
    text, key, C_t, C_k, layers = 1.08, 39.96, 1.0, 2.5, 20
    (got,) = in_node([("attentionMass", text, key, C_t, C_k, cosine, drift, layers)])
    l = np.arange(1, layers + 1)
    S = theory.alignment(text, C_t, cosine, drift, l) * theory.alignment(key, C_k, cosine, drift, l)
    np.testing.assert_allclose(got, theory.mass_bounds(S, 128, 576, 20.0).lower, rtol=1e-10)


def test_the_page_is_small_and_stands_alone():
    text = PAGE.read_text()
    assert PAGE.stat().st_size < 100_000
    assert not re.findall(r"https?://|<link|<iframe|\bimport\b|fetch\(|XMLHttpRequest|@import|url\(|src=", text)


def test_presets_are_the_published_numbers():
    from theory.published import MEASURED

    text = PAGE.read_text()
    for norms in ("39.96, 1.08", "56.88, 0.86", "64, 1.38"):
        assert f"even({norms})" in text
    for vision, words in zip(MEASURED[::2], MEASURED[1::2], strict=True):
        pair = f"[{vision.ratio:g}, {vision.angle_cosine:g}], [{words.ratio:g}, {words.angle_cosine:g}]"
        assert pair in text, vision.model


@pytest.fixture
def page():
    """The explorer in a headless Chromium; every error that the page reports fails the test."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=120_000)
        tab = browser.new_page(viewport={"width": 1200, "height": 1400})
        tab.set_default_timeout(60_000)
        errors, requests = [], []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(PAGE.as_uri())
        yield tab
        browser.close()
    assert not errors
    assert requests == [PAGE.as_uri()]


def number(page, name: str) -> float:
    return float(page.inner_text(f"#{name}"))


def field(page, name: str) -> float:
    return float(page.input_value(f"#{name}-number"))


def expected_turn(page, kind: str) -> float:
    """What theory says to the page's numbers of this modality, in degrees."""
    suffix = kind.capitalize()
    n, C, phi = (field(page, dial + suffix) for dial in ("n", "C", "phi"))
    return float(np.degrees(theory.step_angle(n, C, np.radians(phi))))


@pytest.mark.slow
def test_dragging_a_slider_turns_the_token(page):
    assert number(page, "turn-visual") == pytest.approx(1.434, abs=1e-3)
    assert number(page, "turn-text") == pytest.approx(42.80, abs=1e-2)
    box = page.locator("#nVisual").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.8 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.45 * box["width"], middle, steps=5)
    page.mouse.up()
    assert field(page, "nVisual") < 10
    assert number(page, "turn-visual") == pytest.approx(expected_turn(page, "visual"), rel=1e-3)
    assert number(page, "turn-text") == pytest.approx(42.80, abs=1e-2)


@pytest.mark.slow
def test_dragging_an_arrow_sets_update_and_angle(page):
    page.uncheck("#linked")
    tip = page.locator("#step-text .tip").bounding_box()
    x, y = tip["x"] + tip["width"] / 2, tip["y"] + tip["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y + 10, steps=4)
    page.mouse.up()
    assert field(page, "phiText") > 95
    assert field(page, "phiVisual") == 90
    assert number(page, "turn-text") == pytest.approx(expected_turn(page, "text"), rel=1e-3)


@pytest.mark.slow
def test_it_works_from_the_keyboard(page):
    page.focus("#phiVisual")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    assert field(page, "phiVisual") == field(page, "phiText") == 100  # linked
    for kind in ("visual", "text"):
        assert number(page, f"turn-{kind}") == pytest.approx(expected_turn(page, kind), rel=1e-3)
    page.focus("text=Qwen3-VL")
    page.keyboard.press("Enter")
    assert page.get_attribute("text=Qwen3-VL", "aria-pressed") == "true"
    assert number(page, "cosine-visual") == pytest.approx(0.618, abs=5e-4)
    assert number(page, "cosine-text") == pytest.approx(0.050, abs=5e-4)
    unlabelled = page.eval_on_selector_all(
        "input, button", "all => all.filter(e => !(e.ariaLabel || e.labels?.length || e.textContent)).length"
    )
    assert unlabelled == 0


@pytest.mark.slow
def test_impossible_numbers_are_refused(page):
    for typed, kept in (("1e9", 300), ("-4", 0.01), ("", 39.96)):
        page.click("text=LLaVA-1.5")
        page.fill("#nVisual-number", typed)
        page.keyboard.press("Tab")
        assert field(page, "nVisual") == kept
    page.fill("#layers-number", "1")
    page.keyboard.press("Tab")
    assert (field(page, "layers"), field(page, "layer")) == (1, 1)
    assert np.isfinite(number(page, "turn-visual"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1200])
def test_a_screenshot_shows_both_colours_and_nothing_sticks_out(page, width, tmp_path):
    from PIL import Image

    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shot = tmp_path / "explorer.png"
    page.screenshot(path=shot, full_page=True)
    colours = {colour for _, colour in Image.open(shot).convert("RGB").getcolors(maxcolors=2**24)}
    assert {(0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2)} <= colours
