"use strict";
// The model: layers x heads, a map of similar heads, a table.

const modelView = { id: "model", name: "Model", draw: drawModel };
let sorting = { key: "layer", down: false };

function openHead(row, model = state.model) { change({ model, row: row.index, view: "head" }); }
// A click is the table's row's; with Ctrl, Shift or the middle button the browser opens the address elsewhere.
function headLink(row, view) {
  const elsewhere = e => e.ctrlKey || e.metaKey || e.shiftKey;
  return node("a", { href: `#${address({ view, row: row.index })}`, "aria-label": headName(row), onclick: e => { elsewhere(e) ? e.stopPropagation() : e.preventDefault(); } }, row.layer);
}
const shown = row => state.kinds.has(row.kind ?? "–");

function shadeChoice(chosen = state.shade) {
  return node("label", {}, "colour ", node("select", { id: "shade", onchange: e => change({ shade: e.target.value }) },
    ...Object.keys(COLUMNS).filter(key => key !== "kind" || chosen === "kind" || state.view === "model").map(key => node("option", { value: key, selected: chosen === key }, COLUMNS[key].name))));
}
function kindChoice(rows) {
  const kinds = ["local", "between", "global", "–"].filter(kind => rows.some(r => (r.kind ?? "–") === kind));
  return node("fieldset", { class: "kinds" }, node("legend", {}, "show"), ...kinds.map(kind => node("label", {},
    node("input", { type: "checkbox", value: kind, checked: state.kinds.has(kind), onchange: e => {
      const chosen = new Set(state.kinds);
      e.target.checked ? chosen.add(kind) : chosen.delete(kind);
      change({ kinds: chosen });
    } }),
    node("span", { class: "dot", style: `background: ${kindColour(kind === "–" ? null : kind)}` }), `${kind === "–" ? "no kind" : kind} ${rows.filter(r => (r.kind ?? "–") === kind).length}`)));
}

function drawModel(section) {
  const model = models[state.model], { rows } = model, pruned = d3.mean(rows, r => r.pruned_ratio);
  const of = kind => rows.filter(r => r.kind === kind).length;
  const says = !GATED ? `${rows.length} heads: in the median head 99 % of a query's weight lies on ${counted(d3.median(rows, r => r.keys_99), "key")}. Of the blocks of 64 × 64, ${percent(d3.mean(rows, r => r["seen_e-10"]))} could be left out on the way, and ${percent(d3.mean(rows, r => r["after_e-10"]))} by an oracle, with less than e⁻¹⁰ of any row's weight lost.` : `${rows.length} heads: ${of("local")} local, ${of("between")} between, ${of("global")} global. `
    + `${percent(pruned)} of all blocks ${model.exact ? "would be" : "are"} pruned; at most ${percent(rows[0].largest_pruned_ratio)} can be, because blocks on and next to the diagonal always stay.`;
  section.replaceChildren(
    node("p", { class: "lead" }, says),
    node("div", { class: "controls" }, modelChoice(), shadeChoice(), GATED ? kindChoice(rows) : null),
    node("div", { class: "columns" },
      figure("Layers and heads", "Each square is a head. Click one to look into it.", node("div", { id: "grid" }), legend(rows),
        saveButtons(() => fileName(model.name, "heads", state.shade), () => $("#grid svg"))),
      figure("Similar heads", `Near each other: alike in how far they look, ${GATED ? "forget, prune " : ""}and peak. Names are layer.head.`, node("div", { id: "map" }), legend(rows),
        saveButtons(() => fileName(model.name, "map"), () => $("#map svg")))),
    figure("All numbers", "Click a column to sort by it.", headTable(rows),
      saveButtons(() => fileName(model.name, "heads"), null, () => [Object.keys(rows[0]).filter(c => c !== "index"), rows.map(r => Object.entries(r).filter(([c]) => c !== "index").map(([, v]) => v))])));
  const written = state.shade === "kind" ? "median_window_tokens" : state.shade;
  const numbers = headGrid($("#grid"), model, shader(state.shade, rows), COLUMNS[written], { value: r => r[written] });
  if (numbers && state.shade === "kind") $("#view-model figcaption p").append(" The number in it is its window in tokens.");
  headMap($("#map"), rows);
}

function legend(rows, key = state.shade) {
  const shade = shader(key, rows), column = COLUMNS[key];
  if (shade.kinds) return node("p", { class: "legend" }, ...["local", "between", "global"].map(kind => node("span", {}, node("span", { class: "dot", style: `background: ${kindColour(kind)}` }), kind)));
  const ends = shade.domain, stops = d3.range(0, 1.01, 0.1).map(sequential);
  return node("p", { class: "legend" }, `${column.text(ends[0])} `, node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), ` ${column.text(ends[1])}`, node("span", { class: "quiet" }, `${column.name}: ${column.says}`));
}

// Layers x heads as squares; also of two models, where `value` gives what is written on a square. Returns
// whether there is room for that.
function headGrid(place, model, shade, column, { value = row => row[state.shade], pick = row => openHead(row, model.index), tell = null } = {}) {
  const left = 44, top = 26, space = Math.max(220, place.clientWidth);
  const side = Math.max(12, Math.min(64, (space - left - 4) / model.heads)), high = Math.min(side, 44);
  const width = left + side * model.heads + 4, height = top + high * model.layers + 4;
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height)
    .attr("role", "group").attr("aria-label", `${model.name}: layers and heads`);
  const every = Math.ceil(16 / side);
  svg.append("text").attr("class", "axis").attr("x", left).attr("y", 10).text("head");
  svg.append("g").selectAll("text").data(d3.range(0, model.heads, every)).join("text").attr("class", "axis").attr("text-anchor", "middle")
    .attr("x", h => left + side * (h + 0.5)).attr("y", 21).text(h => h);
  const high_every = Math.ceil(12 / high);
  svg.append("g").selectAll("text").data(d3.range(0, model.layers, high_every)).join("text").attr("class", "axis").attr("text-anchor", "end")
    .attr("x", left - 7).attr("y", l => top + high * (l + 0.5) + 4).text(l => (l ? l : "layer 0"));
  const cells = svg.append("g").selectAll("g").data(model.rows).join("g").attr("class", "cell").attr("role", "button")
    .attr("tabindex", (_, i) => (i === state.row || (state.row >= model.rows.length && !i) ? 0 : -1))
    .attr("data-head", r => `${r.layer}.${r.head}`)
    .attr("aria-label", r => `${headName(r)}: ${r.kind ?? "no kind"}, ${column.name} ${column.text(value(r))}`)
    .attr("transform", r => `translate(${left + side * r.head},${top + high * r.layer})`)
    .classed("faint", r => !shown(r)).classed("current", r => r.index === state.row)
    .on("click", (_, r) => { hideTip(); pick(r); })
    .on("pointermove", (event, r) => { if (event.pointerType === "mouse") (tell ?? tipOfRow)(event, r); mark(r); }).on("pointerleave", () => { hideTip(); mark(null); })
    .on("keydown", (event, r) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: model.heads, ArrowUp: -model.heads };
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(r); }
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = cells.nodes()[r.index + steps[event.key]];
      if (next) { cells.attr("tabindex", -1); next.setAttribute("tabindex", 0); next.focus(); mark(model.rows[r.index + steps[event.key]]); }
    });
  cells.append("rect").attr("x", 1).attr("y", 1).attr("width", side - 2).attr("height", high - 2).attr("rx", 3).attr("fill", shade);
  const numbers = side >= 34;
  if (numbers) cells.append("text").attr("x", side / 2).attr("y", high / 2 + 4).attr("text-anchor", "middle").style("fill", r => inkOn(shade(r)))
    .text(r => column.text(value(r)).replace(/\u00a0(%|points)/, "").replace(/^1 − .*/, "1.000"));
  place.replaceChildren(svg.node());
  return numbers;
}

// The same head stands out in the grid, the map and the table.
function mark(row) {
  d3.selectAll(".cell, .place, #heads tbody tr").classed("marked", function () { return row && this.dataset.head === `${row.layer}.${row.head}`; });
}

function headMap(place, rows) {
  const width = Math.max(260, Math.min(520, place.clientWidth)), height = Math.min(340, width * 0.72), pad = 22;
  const x = d3.scaleLinear(d3.extent(rows, r => r.map_x), [pad, width - pad - 14]), y = d3.scaleLinear(d3.extent(rows, r => r.map_y), [height - pad, pad]);
  const shade = shader(state.shade, rows), radius = d3.scaleSqrt([0, 200], [8, 4]).clamp(true)(rows.length);
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", "Map of similar heads; the table below lists the same heads");
  svg.append("rect").attr("class", "frame").attr("width", width - 1).attr("height", height - 1).attr("x", 0.5).attr("y", 0.5).attr("rx", 4);
  svg.append("text").attr("class", "axis").attr("x", width - 8).attr("y", height - 8).attr("text-anchor", "end").text("looks far →");
  const places = svg.selectAll(".place").data(rows).join("g").attr("class", "place").attr("data-head", r => `${r.layer}.${r.head}`)
    .attr("transform", r => `translate(${x(r.map_x)},${y(r.map_y)})`).classed("faint", r => !shown(r)).classed("current", r => r.index === state.row)
    .on("click", (_, r) => { hideTip(); openHead(r); })
    .on("pointermove", (event, r) => { if (event.pointerType === "mouse") tipOfRow(event, r); mark(r); }).on("pointerleave", () => { hideTip(); mark(null); });
  places.append("circle").attr("r", radius).attr("fill", shade);
  // Names where there is room: not on another head, and not on a name.
  const free = rows.filter((r, i) => !rows.some((s, j) => s !== r && Math.abs(y(r.map_y) - y(s.map_y)) < 10 && x(s.map_x) > x(r.map_x) - 26 && x(s.map_x) < x(r.map_x) + 30));
  places.append("text").attr("class", "axis").attr("x", radius + 2).attr("y", 3).text(r => (free.includes(r) ? `${r.layer}.${r.head}` : ""));
  place.replaceChildren(svg.node());
}

function headTable(rows) {
  const keys = ["layer", "head", ...Object.keys(COLUMNS)];
  const sorted = d3.sort(rows.filter(shown), (a, b) => (sorting.down ? d3.descending : d3.ascending)(a[sorting.key] ?? "", b[sorting.key] ?? "") || d3.ascending(a.index, b.index));
  const heads = keys.map(key => node("th", { scope: "col", "aria-sort": sorting.key === key ? (sorting.down ? "descending" : "ascending") : "none" },
    node("button", { type: "button", title: COLUMNS[key]?.says ?? key, "data-sort": key, onclick: () => {
      sorting = { key, down: sorting.key === key ? !sorting.down : !["layer", "head", "kind"].includes(key) };
      change({});
    } }, COLUMNS[key]?.name ?? key)));
  const body = sorted.map(row => node("tr", { "data-head": `${row.layer}.${row.head}`, onclick: () => openHead(row), onpointerenter: () => mark(row), onpointerleave: () => mark(null) },
    ...keys.map(key => {
      if (key === "layer") return node("th", { scope: "row" }, headLink(row, "head"));
      if (key === "kind") return node("td", {}, node("span", { class: "dot", style: `background: ${kindColour(row.kind)}` }), row.kind ?? "–");
      return node("td", {}, key === "head" ? row.head : COLUMNS[key].text(row[key]));
    })));
  return node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, node("table", { id: "heads" }, node("thead", {}, node("tr", {}, ...heads)), node("tbody", {}, ...body)));
}

function modelChoice() {
  if (models.length < 2) return null;
  return node("label", {}, "model ", node("select", { id: "which-model", onchange: e => change({ model: Number(e.target.value) }) },
    ...models.map(m => node("option", { value: m.index, selected: m.index === state.model }, m.name))));
}
