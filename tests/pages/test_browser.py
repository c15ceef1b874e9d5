"""Pages in a real browser: they can be read in light and in dark, on a desk, a phone and paper."""

import base64
import shutil

import pytest

from tests.pages.test_charts import luminance

pytestmark = pytest.mark.slow
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update "
    "--disable-sync --no-first-run --window-size=1280,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if driver is None or not any(
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    ):
        pytest.skip("there is no Chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


LOOKS = """
    const colour = (text) => text.match(/[\\d.]+/g).map(Number);
    const look = (key) => (element) => colour(getComputedStyle(element)[key]);
    const all = (selector) => [...document.querySelectorAll(selector)];
    const words = all("h1, p, th, td, li, summary").map(look("color"));
    const labels = all("svg text")
      .filter((text) => !["white", "black", "#7d838c"].includes(text.getAttribute("fill")))
      .filter((text) => !text.closest("[fill=white], [fill=black], [fill='#7d838c']"))
      .map(look("fill"));
    const narrow = all("svg").filter((svg) => svg.getBoundingClientRect().width < 200);
    return [look("backgroundColor")(document.body), [...words, ...labels], labels.length,
            narrow.length, document.documentElement.scrollWidth];
"""


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_word_can_be_read_and_no_page_is_wider_than_the_screen(browser, folders, mode, width):
    feature = {"name": "prefers-color-scheme", "value": mode}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for kind, folder in folders.items():
        browser.get_log("browser")
        browser.get((folder / "index.html").as_uri())
        paper, inks, labels, narrow, content_width = browser.execute_script(LOOKS)
        assert (sum(paper[:3]) < 150) == (mode == "dark")
        assert labels > 10
        for ink in inks:
            light, dark = sorted((luminance(ink[:3]), luminance(paper[:3])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (kind, ink)
        assert narrow == 0
        assert content_width <= width
        assert browser.get_log("browser") == []


def test_a_page_can_be_printed_with_each_picture_on_one_sheet(browser, folders):
    browser.get((folders["comparison"] / "index.html").as_uri())
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    heights = browser.execute_script("""
        const highest = (svg) => parseFloat(getComputedStyle(svg).maxHeight);
        return [innerHeight, ...[...document.querySelectorAll("svg")].map(highest)];
    """)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert all(height < heights[0] for height in heights[1:])
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
