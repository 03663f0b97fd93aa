"use strict";
// View of two models: the same head of both models, and the difference.

const compareView = { id: "compare", name: "Two models", draw: drawCompare };
const difference = key => row => models[1].rows[row.index][key] - row[key];
// Differences of percentages are in percentage points.
const signed = (column, v) => (v > 0 ? "+" : v < 0 ? "−" : "") + column.text(Math.abs(v)).replace("%", "points");

// A ratio from its logarithm, first rounded to 12 digits, because exp(log(23.5)) may be 23.499999999999996.
const times = log => (log < 6 * Math.LN10 ? whole(Number(Number(Math.exp(log).toPrecision(12)).toPrecision(2))) : `10${superscript(Math.round(log / Math.LN10))}`);
const ramp = (colours, least, most) => node("p", { class: "legend" }, `${least} `, node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${d3.range(1, -0.01, -0.1).map(colours)})` }), ` ${most}`);

async function drawCompare(section) {
  const key = !COLUMNS[state.shade].words ? state.shade : COLUMNS.token_pruned_ratio ? "token_pruned_ratio" : NUMBERS[0], column = COLUMNS[key], [a, b] = models;
  const rows = a.rows, all = [...a.rows, ...b.rows], diff = difference(key);
  // Columns with a logarithmic scale are coloured by the ratio.
  const apart = r => (column.log ? Math.log(onScale(column, b.rows[r.index][key]) / onScale(column, r[key])) : diff(r)), most = d3.max(rows, r => Math.abs(apart(r))) || 1;
  const colours = isDark() ? d3.interpolateRgbBasis(["#ff9d85", "#a3422f", "#262c33", "#2c6aa0", "#7cc0ff"]) : d3.interpolateRdBu; // no difference is close to the page colour
  const diverging = r => colours(0.5 - 0.5 * apart(r) / most), changed = rows.filter(r => r.kind !== b.rows[r.index].kind).length;
  section.replaceChildren(
    node("p", { class: "lead" }, `${changed} of ${rows.length} heads differ in kind between ${a.name} and ${b.name}. The mean ${column.name} changes from ${column.text(Number(d3.mean(rows, r => r[key]).toPrecision(3)))} to ${column.text(Number(d3.mean(b.rows, r => r[key]).toPrecision(3)))}.`),
    node("div", { class: "controls" }, shadeChoice(key)),
    node("div", { class: "columns three" },
      figure(a.name, a.pruning, node("div", { id: "grid-a" }), legend(all, key), saveButtons(() => fileName(a.name, key), () => $("#grid-a svg"))),
      figure(b.name, b.pruning, node("div", { id: "grid-b" }), legend(all, key), saveButtons(() => fileName(b.name, key), () => $("#grid-b svg"))),
      figure("Difference", `${column.name}, second minus first${column.log ? "; coloured by the ratio" : ""}`, node("div", { id: "grid-d" }), ramp(colours, ...(column.log ? [`÷ ${times(most)}`, `× ${times(most)}`] : [signed(column, -most), signed(column, most)])), saveButtons(() => fileName("difference", key), () => $("#grid-d svg")))),
    node("div", { class: "columns" },
      figure("Head by head", `${column.name}: ${a.name} on the x axis, ${b.name} on the y axis`, node("div", { id: "scatter" }), legend(rows, "kind"), saveButtons(() => fileName("two-models", key), () => $("#scatter svg"))),
      figure(`Weight by distance: ${headName(rows[state.row])}`, null, node("p", { class: "legend" }, node("span", {}, node("span", { class: "swatch of0" }), a.name), node("span", {}, node("span", { class: "swatch of1" }), b.name)),
        node("div", { id: "distances" }), node("div", { class: "controls" }, ...models.map(m => node("button", { type: "button", onclick: () => openHead(m.rows[state.row], m.index) }, `open in ${m.name}`))), saveButtons(rowFile("two-distances"), () => $("#distances svg")))),
    figure("Largest differences", null, differenceTable(rows, key, diff),
      saveButtons(() => "two-models", null, () => [["layer", "head", ...SORTS.flatMap(k => [`${k}_1`, `${k}_2`])], rows.map(r => [r.layer, r.head, ...SORTS.flatMap(k => [r[k], b.rows[r.index][k]])])])));
  const pick = row => change({ row: row.index });
  const tell = (event, row) => showTip(event, node("strong", {}, headName(row)), node("p", {}, `${column.name}: ${column.text(a.rows[row.index][key], a.rows[row.index])} → ${column.text(b.rows[row.index][key], b.rows[row.index])}`));
  headGrid($("#grid-a"), a, shader(key, all), column, { value: r => r[key], pick, tell });
  headGrid($("#grid-b"), b, shader(key, all), column, { value: r => r[key], pick, tell });
  headGrid($("#grid-d"), a, diverging, { ...column, text: v => signed(column, v) }, { value: diff, pick, tell });
  drawScatter($("#scatter"), rows, key, column, pick, tell);
  const wanted = state.row, heads = await Promise.all(models.map(m => m.head(wanted)));
  if (wanted === state.row && $("#distances")) drawDistance($("#distances"), heads);
}

function drawScatter(place, rows, key, column, pick, tell) {
  const size = Math.max(260, Math.min(400, place.clientWidth)), left = 52, other = models[1].rows;
  const domain = d3.extent([...rows, ...other], r => (onScale(column, r[key]))), make = column.log ? d3.scaleLog : d3.scaleLinear;
  const x = make(domain, [left, size - 12]), y = make(domain, [size - 34, 10]), ticks = [4, column.floor ? column.text : column.log ? "~s" : undefined];
  const svg = d3.create("svg").attr("viewBox", `0 0 ${size} ${size}`).attr("width", size).attr("height", size).attr("role", "img").attr("aria-label", "Each head in both models; the table below lists them");
  svg.append("g").attr("class", "axes").attr("transform", `translate(0,${size - 30})`).call(d3.axisBottom(x).ticks(...ticks));
  svg.append("g").attr("class", "axes").attr("transform", `translate(${left - 4},0)`).call(d3.axisLeft(y).ticks(...ticks));
  svg.append("line").attr("class", "mark").attr("x1", x(domain[0])).attr("y1", y(domain[0])).attr("x2", x(domain[1])).attr("y2", y(domain[1]));
  svg.append("text").attr("class", "axis").attr("x", size - 12).attr("y", size - 36).attr("text-anchor", "end").text(models[0].name);
  svg.append("text").attr("class", "axis").attr("x", left + 4).attr("y", 12).text(models[1].name);
  svg.selectAll(".place").data(rows).join("g").attr("class", "place").attr("data-head", r => `${r.layer}.${r.head}`).classed("current", r => r.index === state.row)
    .attr("transform", r => `translate(${x(onScale(column, r[key]))},${y(onScale(column, other[r.index][key]))})`)
    .on("click", (_, r) => { hideTip(); pick(r); }).on("pointermove", (event, r) => { tell(event, r); mark(r); }).on("pointerleave", () => { hideTip(); mark(null); })
    .append("circle").attr("r", 5).attr("fill", r => kindColour(r.kind));
  place.replaceChildren(svg.node());
}

function differenceTable(rows, key, diff) {
  const column = COLUMNS[key], other = models[1].rows, sorted = d3.sort(rows, (a, b) => Math.abs(diff(b)) - Math.abs(diff(a)));
  const heads = ["layer", "head", `kind, ${models[0].name}`, `kind, ${models[1].name}`, `${titled(key)}, ${models[0].name}`, `${titled(key)}, ${models[1].name}`, "difference"];
  return node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Largest differences" }, node("table", { id: "differences" },
    node("thead", {}, node("tr", {}, ...heads.map(h => node("th", { scope: "col" }, h)))),
    node("tbody", {}, ...sorted.map(r => node("tr", { "data-head": `${r.layer}.${r.head}`, onclick: () => change({ row: r.index }) },
      node("th", { scope: "row" }, headLink(r, "compare")),
      ...[r.head, kindName(r.kind), kindName(other[r.index].kind), column.text(r[key], r), column.text(other[r.index][key], other[r.index]), signed(column, diff(r))].map(v => node("td", {}, v)))))));
}
