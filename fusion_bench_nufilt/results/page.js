// Draws the charts, whose definitions stand beside them, and sorts tables by a click on a header.
const narrow = window.innerWidth < 700;

for (const holder of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(holder.nextElementSibling.textContent);
  if (narrow) Object.assign(spec.config.legend, { orient: "bottom", columns: 1, labelLimit: 250 });
  // The interpreter of expressions does without eval, which the page forbids.
  vegaEmbed(holder, spec, { mode: "vega-lite", actions: false, ast: true, renderer: "svg" });
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
