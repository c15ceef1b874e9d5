// Draws the charts, whose definitions stand beside them, and sorts tables by the buttons in their headers.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => location.reload());
const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => getComputedStyle(document.body).getPropertyValue(name));
const colours = {
  axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft },
  legend: { labelColor: ink, titleColor: ink },
  header: { labelColor: ink, titleColor: ink },
  title: { color: ink },
  view: { stroke: line },
  text: { color: ink },
  rule: { color: ink },
};
// Colours in charts that are not seen on a dark page, or too well.
const onDark = new Map(dark.matches ? [["#000000", ink], ["#0072B2", "#3b9ddd"]] : []);

async function draw(holder, spec) {
  // The interpreter of expressions does without eval, which the page forbids.
  await vegaEmbed(holder, spec, { mode: "vega-lite", actions: false, ast: true, renderer: "svg" });
  holder.dataset.drawn = "yes";
}

const theme = { ...JSON.parse(document.getElementById("theme").textContent), background: "transparent" };
for (const [part, colour] of Object.entries(colours)) theme[part] = { ...theme[part], ...colour };

for (const holder of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(holder.nextElementSibling.textContent, (_, value) => onDark.get(value) ?? value);
  draw(holder, { ...spec, config: theme });
}

// A number without its deviation.
const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.replace(/ ±.*/, "");

for (const button of document.querySelectorAll("th button")) {
  const header = button.parentElement;
  button.addEventListener("click", () => {
    const body = header.closest("table").tBodies[0];
    const column = header.cellIndex;
    const down = header.getAttribute("aria-sort") !== "descending";
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const compare = (a, b) => {
      const [x, y] = [valueOf(a, column), valueOf(b, column)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays at the end
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
