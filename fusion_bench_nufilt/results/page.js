// Draws the charts, whose numbers stand beside them, and sorts tables by a click on a header.
const narrow = window.innerWidth < 700;

for (const holder of document.querySelectorAll(".chart")) {
  const figure = JSON.parse(holder.nextElementSibling.textContent);
  const layout = Object.assign({ font: { family: "system-ui, sans-serif", size: narrow ? 10 : 12 } }, figure.layout);
  if (narrow) {
    const [y, yanchor] = layout.sliders || layout.updatemenus ? [1.25, "bottom"] : [-0.35, "top"];
    layout.legend = { orientation: "h", x: 0, y, xanchor: "left", yanchor };
  }
  Plotly.newPlot(holder, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  if (figure.choices) addChoices(holder, figure.choices);
}

// A choice of the quantity and a slider for the step, above a chart that has numbers for each of them.
function addChoices(holder, choices) {
  const steps = Object.values(choices)[0].length;
  const controls = document.createElement("p");
  controls.className = "controls";
  controls.innerHTML = `<label>show <select></select></label>
    <label>after step <input type="range" min="1" max="${steps}" value="${steps}"> <output>${steps}</output></label>`;
  const [quantity, step, shown] = ["select", "input", "output"].map((name) => controls.querySelector(name));
  step.parentElement.hidden = steps === 1;
  for (const name of Object.keys(choices)) quantity.add(new Option(name));
  controls.addEventListener("input", () => {
    shown.value = step.value;
    const y = choices[quantity.value][step.value - 1];
    Plotly.update(holder, { y }, { "yaxis.title.text": quantity.value });
  });
  holder.before(controls);
}

const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;

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
