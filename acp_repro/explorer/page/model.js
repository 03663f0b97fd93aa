"use strict";
// View of the model: a grid of layers and heads, a scatter plot of similar heads, thumbnails and a table.

const modelView = { id: "model", name: "Model", draw: drawModel };
const sorting = { key: "layer", down: false };
let thumbsShow = "weights";
const mapAxes = { x: "half_weight_tokens", y: "strongest_weight" };

function openHead(row, model = state.model) { change({ model, row: row.index, view: "head" }); }
// The table row handles a plain click; with Ctrl, Shift or the middle button the browser opens the link elsewhere.
function headLink(row, view) {
  const elsewhere = e => e.ctrlKey || e.metaKey || e.shiftKey;
  return node("a", { href: `#${address({ view, row: row.index })}`, "aria-label": headName(row), onclick: e => { elsewhere(e) ? e.stopPropagation() : e.preventDefault(); } }, row.layer);
}
const shown = row => state.kinds.has(row.kind ?? "–");

function shadeChoice(chosen = state.shade) {
  return columnChoice("colour", "shade", [...(state.view === "model" && COLUMNS.kind ? ["kind"] : []), ...NUMBERS], chosen, shade => change({ shade }));
}
function columnChoice(says, id, keys, chosen, choose) {
  return node("label", {}, `${says} `, node("select", { id, onchange: e => choose(e.target.value) }, ...keys.map(key => node("option", { value: key, selected: chosen === key }, titled(key)))));
}
function kindChoice(rows) {
  const kinds = ["local", "intermediate", "global", "–"].filter(kind => rows.some(r => (r.kind ?? "–") === kind));
  return node("fieldset", { class: "kinds" }, node("legend", {}, "show"), ...kinds.map(kind => node("label", {},
    node("input", { type: "checkbox", value: kind, checked: state.kinds.has(kind), onchange: e => {
      const chosen = new Set(state.kinds);
      e.target.checked ? chosen.add(kind) : chosen.delete(kind);
      change({ kinds: chosen });
    } }),
    node("span", { class: "dot", style: `background: ${kindColour(kind === "–" ? null : kind)}` }), `${kind === "–" ? "no kind" : kindName(kind)} ${rows.filter(r => (r.kind ?? "–") === kind).length}`)));
}

function drawModel(section) {
  const model = models[state.model], { rows } = model, pruned = d3.mean(rows, r => r.pruned_ratio);
  const of = kind => rows.filter(r => r.kind === kind).length;
  const says = !GATED ? `${rows.length} heads. In the median head, 99 % of a query's weight is on ${counted(d3.median(rows, r => r.keys_99), "key")}. ${percent(d3.mean(rows, r => r["seen_e-10"]))} of the blocks of 64 × 64 could be pruned online and ${percent(d3.mean(rows, r => r["after_e-10"]))} by an oracle, with a loss of less than e⁻¹⁰ of any row's weight.` : `${rows.length} heads: ${of("local")} local, ${of("intermediate")} intermediate, ${of("global")} global. `
    + `${percent(pruned)} of all blocks ${model.exact ? "would be" : "are"} pruned. The achievable maximum is ${percent(rows[0].largest_pruned_ratio)}, because ACP never prunes the blocks on and next to the diagonal.`;
  section.replaceChildren(
    node("p", { class: "lead" }, says),
    node("div", { class: "controls" }, modelChoice(), shadeChoice(), GATED ? kindChoice(rows) : null),
    node("div", { class: "columns" },
      figure("Layers and heads", "Each square is a head. Click a square to open the head.", node("div", { id: "grid" }), legend(rows),
        saveButtons(() => fileName(model.name, "heads", state.shade), () => $("#grid svg"))),
      figure("Similar heads", "Nearby heads have similar values of both quantities. Labels are layer.head.",
        node("div", { class: "controls" }, ...["x", "y"].map(axis => columnChoice(`${axis} axis`, `map-${axis}`, NUMBERS, mapAxes[axis], key => { mapAxes[axis] = key; headMap($("#map"), rows); }))),
        node("div", { id: "map" }), legend(rows),
        saveButtons(() => fileName(model.name, "map"), () => $("#map svg")))),
    figure("All heads", null,
      node("div", { class: "controls" }, GATED ? node("label", {}, "show ", node("select", { id: "thumbs-show", onchange: e => { thumbsShow = e.target.value; drawThumbs($("#thumbs"), model); } },
        ...[["weights", "attention weights"], ["decay", "decay matrix D"]].map(([value, says]) => node("option", { value, selected: value === thumbsShow }, says)))) : null,
        node("span", { class: "quiet" }, `Queries run down, keys to the right.${GATED ? " Keys left of the line are pruned." : ""} Click a head to open it.`)),
      node("div", { id: "thumbs" })),
    figure("All numbers", "Click a column to sort by it.", headTable(rows),
      saveButtons(() => fileName(model.name, "heads"), null, () => [Object.keys(rows[0]).filter(c => c !== "index"), rows.map(r => Object.entries(r).filter(([c]) => c !== "index").map(([, v]) => v))])));
  drawThumbs($("#thumbs"), model);
  const written = state.shade === "kind" ? "median_window_tokens" : state.shade;
  const numbers = headGrid($("#grid"), model, shader(state.shade, rows), COLUMNS[written], { value: r => r[written] });
  if (numbers && state.shade === "kind") $("#view-model figcaption p").append(" The number is the effective context (p50) in tokens.");
  headMap($("#map"), rows);
}

function legend(rows, key = state.shade) {
  const shade = shader(key, rows), column = COLUMNS[key];
  if (shade.kinds) return node("p", { class: "legend" }, ...["local", "intermediate", "global"].map(kind => node("span", {}, node("span", { class: "dot", style: `background: ${kindColour(kind)}` }), kindName(kind))));
  const ends = shade.domain, stops = d3.range(0, 1.01, 0.1).map(sequential);
  return node("p", { class: "legend" }, `${column.text(ends[0])} `, node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), ` ${column.text(ends[1])}`, node("span", { class: "quiet" }, `${titled(key)}: ${column.says}`));
}

// Draws layers and heads as squares, also for two models; `value` returns the number on a square. Returns whether the
// squares have room for numbers.
function headGrid(place, model, shade, column, { value = row => row[state.shade], pick = row => openHead(row, model.index), tell = null } = {}) {
  const left = 44, top = 26, space = Math.max(220, place.clientWidth);
  const side = Math.max(12, Math.min(110, (space - left - 4) / model.heads)), high = Math.min(side, 44);
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
    .attr("aria-label", r => `${headName(r)}: ${[r.kind ? kindName(r.kind) : "no kind", r.labels].filter(Boolean).join(", ")}, ${column.name} ${column.text(value(r), r)}`)
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
    .text(r => column.text(value(r), r).replace(/ keys$/, "").replace(/\u00a0(%|points)/, "").replace(/^1 − .*/, "1.000"));
  place.replaceChildren(svg.node());
  return numbers;
}

// Highlights the same head in the grid, the scatter plot, the thumbnails and the table.
function mark(row) {
  d3.selectAll(".cell, .place, .thumb, #heads tbody tr").classed("marked", function () { return row && this.dataset.head === `${row.layer}.${row.head}`; });
}

// The scale of a column, with ticks; a logarithmic scale of distances includes 0.
function columnScale(column, rows, key, range) {
  const shift = column.log && !column.floor ? 1 : 0, values = rows.map(r => (column.log ? onScale({ floor: column.floor ?? 0, log: true }, r[key]) : r[key]) + shift);
  const [least, most] = d3.extent(values), domain = column.log ? [least, Math.max(most, 2 * least)] : least < most ? [least, most] : [least - 0.5, most + 0.5];
  const scale = (column.log ? d3.scaleLog : d3.scaleLinear)(domain, range), place = v => scale((column.log ? Math.max(column.floor ?? 0, v) : v) + shift);
  const round = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000].filter(v => v + 1 >= least && v + 1 <= most);
  const every = Math.ceil(round.length / 7), ticks = shift && round.length > 1 ? round.filter((_, i) => i % every === 0).map(v => v + 1) : scale.ticks(4);
  const digits = Math.max(0, -Math.floor(Math.log10(100 * Math.abs(ticks[1] - ticks[0]) || 1))), text = column.text === percent && !column.log ? v => `${(100 * v).toFixed(digits)}\u00a0%` : v => column.text(v - shift);
  return { place, axis: make => make(scale).tickValues(ticks).tickFormat(text) };
}

function headMap(place, rows) {
  scatterPlot(place, rows, ...["x", "y"].map(axis => [mapAxes[axis], COLUMNS[mapAxes[axis]]]), {
    says: `Heads by ${titled(mapAxes.x)} and ${titled(mapAxes.y)}; the table below lists the same heads`,
    shade: shader(state.shade, rows), name: r => `${r.layer}.${r.head}`, pick: openHead, tell: (event, r) => tipOfRow(event, r), heads: true });
}

// A scatter plot of two columns, each passed as a key and its description. `other` is the key of a second vertical
// value, drawn as a ring.
function scatterPlot(place, rows, [acrossKey, across], [upKey, up], { says, shade, name, pick, tell, widest = 600, heads = false, other = null }) {
  const width = Math.max(260, Math.min(widest, place.clientWidth)), height = Math.min(heads ? 360 : 460, width * 0.78), left = 62, bottom = 40;
  const x = columnScale(across, rows, acrossKey, [left + 14, width - 32]), y = columnScale(up, rows, upKey, [height - bottom - 14, 30]);
  const px = r => x.place(r[acrossKey]), py = r => y.place(r[upKey]), axisName = column => `${column.name}${column.unit ? ` (${column.unit})` : ""}`;
  const radius = d3.scaleSqrt([0, 200], [7, 4]).clamp(true)(rows.length);
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height).attr("role", "img").attr("aria-label", says);
  svg.append("rect").attr("class", "frame").attr("width", width - left - 1).attr("height", height - bottom - 18).attr("x", left).attr("y", 18);
  svg.append("g").attr("class", "axes").attr("transform", `translate(0,${height - bottom})`).call(x.axis(d3.axisBottom)).select(".domain").remove();
  svg.append("g").attr("class", "axes").attr("transform", `translate(${left},0)`).call(y.axis(d3.axisLeft)).select(".domain").remove();
  svg.append("text").attr("class", "axis").attr("x", (left + width) / 2).attr("y", height - 6).attr("text-anchor", "middle").text(axisName(across));
  svg.append("text").attr("class", "axis").attr("x", 4).attr("y", 11).text(axisName(up));
  if (other) {
    svg.selectAll(".link").data(rows).join("line").attr("class", "link").attr("x1", px).attr("x2", px).attr("y1", py).attr("y2", r => y.place(r[other]));
    svg.selectAll(".ring").data(rows).join("circle").attr("class", "ring").attr("cx", px).attr("cy", r => y.place(r[other])).attr("r", 4);
  }
  const places = svg.selectAll(".place").data(rows).join("g").attr("class", "place").attr("transform", r => `translate(${px(r)},${py(r)})`)
    .on("click", (_, r) => { hideTip(); pick(r); })
    .on("pointermove", (event, r) => { if (event.pointerType === "mouse") tell(event, r); if (heads) mark(r); }).on("pointerleave", () => { hideTip(); mark(null); });
  if (heads) places.attr("data-head", name).classed("faint", r => !shown(r)).classed("current", r => r.index === state.row);
  places.append("circle").attr("r", radius).attr("fill", shade);
  places.filter(r => r.certified).raise(); // above other rules at the same position
  // Labels where there is room: right, left, above or below the point, without overlapping a point or a label.
  ruler.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const taken = rows.map(r => [px(r) - radius, py(r) - radius, px(r) + radius, py(r) + radius]);
  if (other) taken.push(...rows.map(r => [px(r) - 4, y.place(r[other]) - 4, px(r) + 4, y.place(r[other]) + 4]));
  const sides = [[radius + 2, 3, "start"], [-radius - 2, 3, "end"], [0, -radius - 3, "middle"], [0, radius + 10, "middle"]];
  places.append("text").attr("class", "axis").each(function (r) {
    const wide = ruler.measureText(name(r)).width;
    for (const [dx, dy, anchor] of sides) {
      const from = px(r) + dx - (anchor === "end" ? wide : anchor === "middle" ? wide / 2 : 0), box = [from, py(r) + dy - 9, from + wide, py(r) + dy + 2];
      if (box[0] < left || box[2] > width || taken.some(b => box[0] < b[2] && box[2] > b[0] && box[1] < b[3] && box[3] > b[1])) continue;
      taken.push(box);
      d3.select(this).attr("x", dx).attr("y", dy).attr("text-anchor", anchor).text(name(r));
      return;
    }
  });
  place.replaceChildren(svg.node());
}

// Thumbnails of all heads. Heads are decoded one at a time, and only opened heads are cached.
async function drawThumbs(place, model) {
  const gap = 6, wide = Math.max(40, Math.min(200, Math.floor((place.clientWidth - 4) / model.heads) - gap)), ratio = Math.min(2, devicePixelRatio || 1);
  const thumbs = model.rows.map(row => node("button", { type: "button", class: `thumb${shown(row) ? "" : " faint"}${row.index === state.row ? " current" : ""}`, "data-head": `${row.layer}.${row.head}`, "aria-label": `${headName(row)}: ${[kindName(row.kind), row.labels].filter(Boolean).join(", ")}`, style: `width: ${wide}px`, tabindex: row.index === state.row || (state.row >= model.rows.length && !row.index) ? 0 : -1,
    onclick: () => openHead(row, model.index), onpointermove: e => { if (e.pointerType === "mouse") tipOfRow(e, row); mark(row); }, onpointerleave: () => { hideTip(); mark(null); } },
    node("canvas", { width: wide * ratio, height: wide * ratio, style: `width: ${wide}px; height: ${wide}px`, "aria-hidden": "true" }),
    node("span", {}, node("span", { class: "dot", style: `background: ${kindColour(row.kind)}` }), `${row.layer}.${row.head}`, row.labels && wide >= 100 ? node("span", { class: "quiet" }, ` ${row.labels}`) : null)));
  // Tab focuses one thumbnail, and the arrow keys move to the others.
  place.onkeydown = event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: model.heads, ArrowUp: -model.heads }[event.key], here = thumbs.indexOf(event.target), next = thumbs[here + step];
    if (!step) return;
    event.preventDefault();
    if (!next) return;
    event.target.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  };
  place.style.gridTemplateColumns = `repeat(${model.heads}, ${wide}px)`;
  place.replaceChildren(...thumbs);
  for (const [i, thumb] of thumbs.entries()) {
    const head = await model.read(i).then(pruned);
    if (!thumb.isConnected) return;
    paintThumb($("canvas", thumb), head, thumbsShow);
  }
  place.dataset.drawn = thumbsShow;
}
function paintThumb(canvas, head, show) {
  const { width: size } = canvas, { cell, length: T } = head.model, context = canvas.getContext("2d"), scale = size / T;
  if (show === "decay") context.drawImage(decayImage(head, { key: 0, query: 0, tokens: T }, size), 0, 0);
  else context.drawImage(squaresImage(head, (m, n) => head.square(m, n)), 0, 0, Math.ceil(T / cell) * cell * scale, Math.ceil(T / cell) * cell * scale);
  if (!GATED) return;
  const [blockQ] = head.model.grid;
  context.strokeStyle = style("--boundary");
  context.lineWidth = Math.max(1, size / 90);
  context.beginPath();
  head.boundary.forEach((_, m) => {
    const x = head.firstOfBlocks(m * blockQ) * scale;
    context.lineTo(x, m * blockQ * scale);
    context.lineTo(x, Math.min(T, (m + 1) * blockQ) * scale);
  });
  context.stroke();
}

function headTable(rows) {
  const columns = { layer: { name: "layer" }, head: { name: "head" }, ...COLUMNS };
  return sortableTable("heads", rows.filter(shown), columns, sorting, (row, key) => {
    if (key === "layer") return headLink(row, "head");
    if (key === "kind") return [node("span", { class: "dot", style: `background: ${kindColour(row.kind)}` }), kindName(row.kind)];
    return key === "head" ? row.head : COLUMNS[key].text(row[key], row);
  }, row => ({ "data-head": `${row.layer}.${row.head}`, onclick: () => openHead(row), onpointerenter: () => mark(row), onpointerleave: () => mark(null) }));
}

// A click on a column changes `sorting`; `cell` returns the content of a cell, `valueOf` the value to sort by.
function sortableTable(id, rows, columns, sorting, cell, attributes, valueOf = (row, key) => row[key]) {
  const sorted = d3.sort(rows, (a, b) => (sorting.down ? d3.descending : d3.ascending)(valueOf(a, sorting.key) ?? "", valueOf(b, sorting.key) ?? "") || d3.ascending(a.index, b.index));
  const heads = Object.entries(columns).map(([key, column]) => node("th", { scope: "col", "aria-sort": sorting.key === key ? (sorting.down ? "descending" : "ascending") : "none" },
    node("button", { type: "button", title: column.says ?? column.name, "data-sort": key, onclick: () => {
      Object.assign(sorting, { key, down: sorting.key === key ? !sorting.down : "text" in column && !column.words });
      change({});
    } }, column.name, column.unit ? node("span", { class: "unit" }, column.unit) : null)));
  const body = sorted.map(row => node("tr", attributes(row), ...Object.keys(columns).map((key, i) => node(i ? "td" : "th", i ? {} : { scope: "row" }, ...[cell(row, key)].flat()))));
  return node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, node("table", { id }, node("thead", {}, node("tr", {}, ...heads)), node("tbody", {}, ...body)));
}

function modelChoice() {
  if (models.length < 2) return null;
  return node("label", {}, "model ", node("select", { id: "which-model", onchange: e => change({ model: Number(e.target.value) }) },
    ...models.map(m => node("option", { value: m.index, selected: m.index === state.model }, m.name))));
}
