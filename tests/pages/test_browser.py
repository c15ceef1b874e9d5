"""Pages in a real browser: no error, the rows and charts are there, tables sort, and a phone shows
all of it.
"""

import csv
import json
import shutil

import pytest

from fusion_bench_nufilt.compare.summary import save_comparison
from fusion_bench_nufilt.pages.comparison import comparison_outputs
from fusion_bench_nufilt.pages.content import Comparison
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import read_json, write_json, write_text
from tests.compare.helpers import comparison, finished
from tests.pages.helpers import FOLDERS, LAYERS, TASKS
from tests.pages.sizes import comparison_of
from tests.pages.test_charts import luminance

pytestmark = pytest.mark.slow
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update "
    "--disable-sync --no-first-run --window-size=1200,900"
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for kind, make in FOLDERS.items():
        write_results(make(folder / kind))
    return {kind: folder / kind / "index.html" for kind in FOLDERS}


def show(browser, page, width=1200):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    browser.get_log("browser")
    browser.get(page.as_uri())
    charts = browser.find_elements("css selector", ".chart")
    WebDriverWait(browser, 20).until(
        lambda _: all(chart.get_attribute("data-drawn") for chart in charts)
    )
    return charts


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_chart_is_drawn_without_an_error_and_fits(browser, pages, kind, width):
    charts = show(browser, pages[kind], width)
    assert len(charts) >= 2
    for chart in charts:
        assert chart.find_elements("css selector", "svg.marks [role='graphics-symbol']")
        assert chart.find_element("css selector", "svg").size["width"] <= width - 32  # the margins
    words = "return [...document.querySelectorAll('svg text')].map((text) => text.textContent)"
    assert "\u2212" not in "".join(browser.execute_script(words))  # tables have the other minus
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("seeds", [[42], [42, 43]])
def test_no_word_of_a_chart_is_cut(browser, tmp_path, seeds, width):
    runs = {}
    for name in ("nufilt/adapter_only", "simple_average", "a_method_with_a_very_long_name"):
        runs[name] = [finished(seed, -0.1) for seed in seeds]
    save_comparison(comparison(runs, preset="ablation"), tmp_path)
    show(browser, tmp_path / "index.html", width)
    script = """
        const right = (element) => element.getBoundingClientRect().right;
        const left = (element) => element.getBoundingClientRect().left;
        const cut = [];
        for (const chart of document.querySelectorAll(".chart")) {
          const page = chart.parentElement;
          for (const word of chart.querySelectorAll("svg text")) {
            if (word.textContent && (left(word) < left(page) - 1 || right(word) > right(page) + 1))
              cut.push(word.textContent);
          }
        }
        return cut;
    """
    assert browser.execute_script(script) == []


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_words_and_charts_can_be_read_in_both_modes_and_nothing_is_cut_at_1280_pixels(
    browser, pages, kind, mode
):
    feature = {"name": "prefers-color-scheme", "value": mode}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    show(browser, pages[kind], 1280)
    script = """
        const colour = (text) => text.match(/[\\d.]+/g).map(Number);
        const look = (key) => (element) => colour(getComputedStyle(element)[key]);
        const all = (selector) => [...document.querySelectorAll(selector)];
        const words = all("h1, p, th, td, summary").map(look("color"));
        const roles = ["axis-label", "axis-title", "legend-label"];
        const labels = all(roles.map((role) => `.role-${role} text`).join(", ")).map(look("fill"));
        const cut = all(".wide").filter((part) => part.scrollWidth > part.clientWidth);
        return [look("backgroundColor")(document.body), [...words, ...labels], cut.length];
    """
    paper, inks, cut = browser.execute_script(script)
    assert (sum(paper[:3]) < 150) == (mode == "dark")
    for ink in inks:
        light, dark = sorted((luminance(ink[:3]), luminance(paper[:3])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert cut == 0


def test_a_click_on_a_header_sorts_and_another_turns_it_round(browser, pages):
    show(browser, pages["comparison"])
    table = browser.find_element("css selector", "table")

    def column():
        return [
            cell.text.partition(" ")[0]
            for cell in table.find_elements("css selector", "tbody td:nth-child(2)")
        ]

    header = table.find_elements("css selector", "th button")[1]  # ACC
    header.click()
    assert column() == ["95.0", "50.0", "40.0", "25.0"]
    header.click()
    assert column() == ["25.0", "40.0", "50.0", "95.0"]


def test_a_header_is_reached_and_pressed_by_the_keyboard(browser, pages):
    show(browser, pages["comparison"])
    header = browser.find_elements("css selector", "th button")[1]
    header.send_keys(" ")
    assert browser.switch_to.active_element == header
    parent = header.find_element("xpath", "..")
    assert parent.get_attribute("aria-sort") == "descending"


#: The sizes in which a page is looked at: methods and tasks.
SIZES = [(1, 1), (3, 8), (15, 20)]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def sized(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sized")
    methods, tasks = request.param
    write_json(folder / "results.json", comparison_of(methods, tasks).as_json())
    content = read_json(folder / "results.json", Comparison, "")
    write_text(folder / "index.html", comparison_outputs(content, {}).page)  # without pictures
    return folder / "index.html"


def test_on_a_phone_no_column_of_a_table_is_cut(browser, sized):
    show(browser, sized, 390)
    script = """
        const cut = (cell) => cell.getBoundingClientRect().right > 390;
        return [...document.querySelectorAll("th, td, button")].filter(cut).length;
    """
    assert browser.execute_script(script) == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("width", [390, 1200, 1280])
def test_a_cell_of_a_heat_map_has_a_number_where_it_has_room_for_it(browser, sized, width):
    show(browser, sized, width)
    script = """
        const shown = (word) => getComputedStyle(word.parentElement).display !== "none";
        return [...document.querySelectorAll(".cells")].map((map) => {
          const cell = map.querySelector(".mark-rect path").getBoundingClientRect();
          const words = [...map.querySelectorAll(".mark-text.role-mark text")];
          return [cell.width, words.filter(shown).length];
        });
    """
    for cell, words in browser.execute_script(script):
        assert (words > 0) == (cell >= 18), (cell, words)


@pytest.mark.parametrize("width", [1200, 1280])
def test_three_heat_maps_stand_side_by_side(browser, tmp_path, width):
    save_comparison(comparison_of(3, 8), tmp_path)
    show(browser, tmp_path / "index.html", width)
    tops = "return [...document.querySelectorAll('.cells')].map((map) => map.offsetTop)"
    assert len(set(browser.execute_script(tops))) == 1


HOSTILE = '</ScRiPt ><svg onload="document.title=1"><script>document.title=1</script>'
#: Names of tasks, methods, tensors and kinds of layers in the folders.
NAMES = {*TASKS, *LAYERS, "a", "b", "c", "NUFILT", "sum", "some_pool", "attention", "mlp"}


def hostile(content):
    """Return a content whose names end in something that a page must not run."""
    if isinstance(content, dict):
        return {hostile(key): hostile(value) for key, value in content.items()}
    if isinstance(content, list):
        return list(map(hostile, content))
    if content in NAMES:
        return content + HOSTILE
    return content


@pytest.mark.parametrize("kind", FOLDERS)
def test_names_of_tasks_methods_and_tensors_run_nothing(browser, tmp_path, kind):
    folder = FOLDERS[kind](tmp_path)
    for file in folder.glob("*.json"):
        file.write_text(json.dumps(hostile(json.loads(file.read_text()))))
    for file in folder.glob("*.csv"):
        rows = list(csv.reader(file.read_text().splitlines()))
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([rows[0], *map(hostile, rows[1:])])
    write_results(folder)
    show(browser, folder / "index.html")
    assert "onload" in browser.find_element("css selector", "body").text
    assert browser.title not in ("", "1")
    assert browser.find_elements("css selector", "svg[onload]") == []
    assert browser.get_log("browser") == []
