"""Pages in a real browser: no error, the rows and charts are there, tables sort, and a phone shows all of it."""

import shutil

import pytest

from fusion_bench_nufilt.results.write import write_page
from tests.results.helpers import FOLDERS

pytestmark = pytest.mark.slow
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --window-size=1200,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if driver is None or not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("there is no Chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {kind: write_page(make(folder / kind)) for kind, make in FOLDERS.items()}


def show(browser, page, width=1200):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    browser.get_log("browser")
    browser.get(page.as_uri())
    return browser.find_elements("css selector", ".chart")


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_chart_is_drawn_without_an_error_and_fits(browser, pages, kind, width):
    charts = show(browser, pages[kind], width)
    assert len(charts) >= 4
    for chart in charts:
        assert chart.find_elements("css selector", ".main-svg")
        assert chart.size["width"] <= width
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_click_on_a_header_sorts_and_another_turns_it_round(browser, pages):
    show(browser, pages["comparison"])
    table = browser.find_element("css selector", "table")

    def column():
        return [cell.text for cell in table.find_elements("css selector", "tbody td:nth-child(2)")]

    header = table.find_elements("css selector", "th")[1]  # ACC
    header.click()
    assert column() == ["95.0", "50.0", "40.0", "25.0"]
    header.click()
    assert column() == ["25.0", "40.0", "50.0", "95.0"]


def test_the_step_slider_changes_the_bars(browser, pages):
    show(browser, pages["run"])
    heights = "return document.querySelectorAll('.chart')[1].data[0].y"
    assert browser.execute_script(heights) == [75, 65, None]
    browser.execute_script(
        "const chart = document.querySelectorAll('.chart')[1];"
        "const step = chart.layout.sliders[0].steps[0];"
        "Plotly.restyle(chart, ...step.args);"
    )
    assert browser.execute_script(heights) == [90, None, None]


def test_the_layer_explorer_shows_another_quantity_and_step(browser, pages):
    show(browser, pages["run"])
    browser.execute_script(
        "const box = document.querySelector('.controls');"
        "box.querySelector('select').selectedIndex = 2;"
        "box.querySelector('input').value = 1;"
        "box.dispatchEvent(new Event('input'));"
    )
    chart = "return document.querySelector('.controls').nextElementSibling"
    assert browser.execute_script(f"{chart}.data[0].y") == [1.5, 1.5]
    assert browser.execute_script(f"{chart}.layout.yaxis.title.text").startswith("data-free loss after")
