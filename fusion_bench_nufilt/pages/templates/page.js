// Draws the charts, whose definitions stand beside them, and sorts tables by a click on a header.
const narrow = window.innerWidth < 700;
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

// All charts within a chart.
const partsOf = (spec) => [spec, ...(spec.vconcat ?? [spec.spec]).filter(Boolean).flatMap(partsOf)];

// Fewer panels side by side or, where there is one already, smaller ones; false where neither helps.
function shrink(spec, width, available) {
  const parts = partsOf(spec);
  const facets = parts.filter((part) => part.columns > 1);
  for (const facet of facets) facet.columns = Math.max(1, Math.floor((facet.columns * available) / width));
  if (facets.length > 0) return true;
  const wide = parts.filter((part) => part.width > 160);
  for (const part of wide) part.width = Math.max(160, part.width - Math.ceil(width - available));
  return wide.length > 0;
}

// Shorter names and legends below, for a narrow page.
function fitLabels(spec, available) {
  Object.assign(spec.config.legend, { orient: "bottom", labelLimit: 250 });
  Object.assign(spec.config.title, { frame: "bounds", limit: available - 20 });
  spec.config.axisDiscrete.labelLimit = 100;
  for (const part of partsOf(spec)) {
    // A panel's name ends with the panel, and begins above the labels beside it.
    if (part.facet) Object.assign(part.facet.header, { labelAnchor: "end", labelLimit: available - 20 });
    for (const { encoding } of part.layer ?? []) {
      for (const { legend } of Object.values(encoding ?? {})) if (legend) legend.columns = 1;
    }
  }
}

async function draw(holder, spec, available) {
  for (let attempt = 0; attempt < 4; attempt++) {
    // The interpreter of expressions does without eval, which the page forbids.
    await vegaEmbed(holder, spec, { mode: "vega-lite", actions: false, ast: true, renderer: "svg" });
    const width = holder.querySelector("svg").getBoundingClientRect().width;
    if (width <= available || !shrink(spec, width, available)) break;
  }
  holder.dataset.drawn = "yes";
}

for (const holder of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(holder.nextElementSibling.textContent, (_, value) => onDark.get(value) ?? value);
  spec.config.background = "transparent";
  for (const [part, colour] of Object.entries(colours)) spec.config[part] = { ...spec.config[part], ...colour };
  const available = holder.parentElement.clientWidth;
  if (narrow) fitLabels(spec, available);
  draw(holder, spec, available);
}

// A number without its deviation and its note.
const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.replace(/ ±.*|†/, "");

for (const header of document.querySelectorAll("th")) {
  header.addEventListener("click", () => {
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
