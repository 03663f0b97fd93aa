"use strict";
// View of one head: gates and their running sum, attention and decay with the boundary, weight by distance.

const headView = { id: "head", name: "Head", draw: drawHeadView };
const isNarrow = () => matchMedia("(max-width: 600px)").matches;

async function drawHeadView(section, before) {
  const wanted = currentRow(), head = await currentHead();
  await text.ready;
  if (state.view !== "head" || wanted !== currentRow()) return;
  // Another query of the same head: the matrix and the focus are kept.
  if (before?.view === "head" && attention.head === head && before.epsilon === state.epsilon && attention.part === shownPart) return attention.choose();
  const focused = document.activeElement?.id === "attention";
  section.replaceChildren(
    node("p", { class: "lead" }, leadOf(head)),
    node("div", { class: "columns even" },
      figure("Attention weights", null,
        node("div", { class: "controls" },
          node("span", { class: "zooms" }, zoomButton("+", "Zoom in", 2), zoomButton("−", "Zoom out", 0.5), zoomButton("full", "Show the full text", 0)), heatLegend(head)),
        node("div", { id: "attention", tabindex: 0, role: "group", "aria-label": "Attention of this head: plus and minus zoom, arrow keys pan, 0 shows the full text" }),
        node("p", { class: "quiet help" }, "Click or tap a square for details. Drag to pan; on a touch screen, start sideways. Zoom with pinch, Ctrl + wheel, + or −."),
        saveButtons(rowFile("attention"), () => $("#attention svg"), () => attentionNumbers(head))),
      node("div", {},
        node("div", { id: "reading", "aria-live": "polite" }, node("p", { id: "readout" }), node("div", { id: "query" })),
        ...(GATED ? [decayFigure(head)] : []),
        figure("Attention by distance", "Mean over all queries. The area of a bar is its fraction of the weight; its height is the weight per doubling of the distance.", node("div", { id: "distance" }),
          saveButtons(rowFile("distance"), () => $("#distance svg"), () => distanceNumbers(head))),
        figure("This head", null, facts(wanted)))));
  drawAttention(head);
  drawDistance($("#distance"), [head]);
  if (focused) $("#attention").focus({ preventScroll: true });
}

// Summarises the tokens at which the head forgets and the tokens that receive weight, which no other number shows.
function leadOf(head) {
  const of = new Map(), T = text.length;
  for (let i = 1; i < T; i++) {
    const piece = text.piece(i), sums = of.get(piece) ?? { piece, count: 0, forgets: 0, received: 0 };
    sums.count++;
    if (GATED) sums.forgets += 1 - head.gate(i);
    sums.received += head.received(i);
    of.set(piece, sums);
  }
  const often = [...of.values()].filter(s => s.count >= Math.max(4, T / 500) && s.piece), most = key => d3.sort(often, (a, b) => b[key] / b.count - a[key] / a.count).slice(0, 3);
  const list = (key, written) => most(key).map(s => `“${readable(s.piece)}” (${written(s[key] / s.count)})`).join(", ");
  if (!often.length) return "No token occurs often enough to determine the tokens to which this head responds.";
  const [worst] = most("forgets"), forgets = !GATED ? "" : worst.forgets / worst.count < 0.005 ? "Forgets almost nothing (1 − f is below 0.005 at every frequent token). " : `Forgets most (1 − f) at ${list("forgets", v => v.toFixed(2))}. `;
  return `${forgets}Attends most (weight received per token, in queries) to ${list("received", d3.format(".2~f"))}.`;
}

// The decay matrix and the pruning at another epsilon, from c, the threshold and the grid in the file.
function decayFigure(head) {
  const own = head.ownLogEpsilon, slider = node("input", { type: "range", id: "epsilon", min: Math.min(-30, Math.floor(own)), max: -0.5, step: 0.5, value: state.epsilon ?? own, "aria-label": "log epsilon, the pruning tolerance", oninput: e => setEpsilon(head, Number(e.target.value)) });
  const made = figure("Decay matrix D", "D is c of the query minus c of the key. A block is pruned if its largest D is below δ.",
    node("div", { class: "beside" }, node("div", { id: "decay" }), node("div", {},
    node("p", { class: "legend" }, node("span", { id: "decay-least" }), node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${d3.range(1, -0.01, -0.1).map(decayColour)})` }), "0 nats", node("span", {}, node("span", { class: "line" }), "boundary")),
    node("div", { class: "epsilon" }, node("label", { for: "epsilon" }, "pruning tolerance log ε"), slider, node("button", { type: "button", id: "own-epsilon", onclick: () => { slider.value = own; setEpsilon(head, null); } }, `reset to ${nats(own)}`)),
    node("p", { id: "pruning", "aria-live": "polite" }))),
    saveButtons(rowFile("decay"), () => $("#decay svg")));
  return made;
}
function setEpsilon(head, logEpsilon) {
  state.epsilon = logEpsilon === head.ownLogEpsilon ? null : logEpsilon;
  pruned(head);
  attention.redraw();
  showQuery(head);
  writeAddress();
}
function sayPruning(head) {
  const at = head.logEpsilon, own = at === head.ownLogEpsilon, ratio = percent(head.prunedRatio), mass = head.prunedMass;
  $("#pruning").replaceChildren(
    node("strong", {}, `pruned ratio ${ratio}`), ` of the causal blocks of this text, at log ε = ${nats(at)} (ε = ${percent(Math.exp(at))}) and δ = ${nats(head.threshold)} nats. `,
    own ? `Max pruned mass: ${d3.max(head.lost) ? percent(d3.max(head.lost)) : "0"} of a query’s weight.` : mass === null ? "" : `Max pruned mass, mean of ${counted(head.model.cell, "query").replace("querys", "queries")}: ${mass < HEAT_FLOOR ? `less than ${percent(HEAT_FLOOR)}` : percent(mass)}.`);
  $("#own-epsilon").disabled = own;
  $("#epsilon").setAttribute("aria-valuetext", `log epsilon ${nats(at)}, pruned ratio ${ratio}`);
  $("#decay-least").textContent = `${nats(1.5 * head.threshold)} nats or less`;
}
const DECAY_PIXELS = new Uint32Array(new Uint8ClampedArray(d3.range(256).flatMap(t => { const { r, g, b } = d3.rgb(decayColour(t / 255)); return [r, g, b, 255]; })).buffer);
// D of the visible part, one pixel per query and key; empty above the diagonal.
function decayImage(head, { key, query, tokens }, size) {
  const canvas = node("canvas", { width: size, height: size }), context = canvas.getContext("2d"), image = context.createImageData(size, size), T = head.c.length;
  const least = 1.5 * head.threshold, pixels = new Uint32Array(image.data.buffer), at = (start, p) => Math.floor(start + (p + 0.5) * tokens / size);
  for (let row = 0; row < size; row++) {
    const i = at(query, row);
    if (i >= T) break;
    for (let column = 0; column < size; column++) {
      const j = at(key, column);
      if (j > i) break;
      pixels[row * size + column] = DECAY_PIXELS[Math.min(255, Math.round(255 * (head.c[i] - head.c[j]) / least))];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
// Draws the same part, token and boundary as the matrix of the weights.
function drawDecay(head, staircase, x, y, side, pick) {
  const place = $("#decay"), size = Math.max(220, Math.min(300, place.clientWidth - 48)), left = 44, ratio = Math.min(2, devicePixelRatio || 1), scale = size / side;
  const canvas = decayImage(head, { key: x.invert(0), query: y.invert(0), tokens: x.invert(side) - x.invert(0) }, Math.round(size * ratio));
  Object.assign(canvas.style, { left: `${left}px`, top: "6px", width: `${size}px`, height: `${size}px` });
  canvas.setAttribute("aria-hidden", "true");
  const svg = d3.create("svg").attr("width", left + size + 4).attr("height", size + 42).attr("viewBox", `0 0 ${left + size + 4} ${size + 42}`).attr("role", "img").attr("aria-label", "Decay matrix D with the boundary");
  svg.append("clipPath").attr("id", "decay-clip").append("rect").attr("width", size).attr("height", size);
  const group = svg.append("g").attr("transform", `translate(${left},6)`), over = group.append("g").attr("clip-path", "url(#decay-clip)");
  over.append("path").attr("class", "boundary").attr("d", d3.line(p => p[0] * scale, p => p[1] * scale)(staircase));
  if (state.token !== null) over.append("line").attr("class", "query").attr("x1", 0).attr("x2", x(state.token + 0.5) * scale).attr("y1", y(state.token + 0.5) * scale).attr("y2", y(state.token + 0.5) * scale);
  group.append("rect").attr("class", "frame").attr("width", size).attr("height", size);
  const [from, to] = [x, y].map(s => s.copy().range(s.range().map(v => v * scale)));
  group.append("g").attr("class", "axes").attr("transform", `translate(0,${size})`).call(d3.axisBottom(from).ticks(3)).select(".domain").remove();
  group.append("g").attr("class", "axes").call(d3.axisLeft(to).ticks(3)).select(".domain").remove();
  group.append("text").attr("class", "axis").attr("x", size / 2).attr("y", size + 33).attr("text-anchor", "middle").text("key (tokens from the start)");
  group.append("rect").attr("class", "pointer").attr("width", size).attr("height", size).on("click", event => { const [px, py] = d3.pointer(event); pick(px / scale, py / scale); });
  place.replaceChildren(canvas, svg.node());
}

function facts(row) {
  return node("dl", { class: "facts" }, ...Object.entries(COLUMNS).flatMap(([key, column]) => [
    node("dt", { title: column.says }, titled(key)), node("dd", {}, column.text(row[key], row))]), node("dd", { class: "quiet" }, "The Glossary explains each quantity."));
}
function zoomButton(sign, says, factor) {
  return node("button", { type: "button", "aria-label": says, title: says, onclick: () => attention.zoomBy(factor) }, sign);
}
const HEAT_FLOOR = 1e-4;
const FAINT = 0.35; // opacity of the unlisted weight, which distinguishes it from listed keys
const heatScale = v => Math.max(0, 1 - Math.log(v) / Math.log(HEAT_FLOOR));
function heatLegend(head) {
  const stops = d3.range(0, 1.01, 0.1).map(heat);
  return node("p", { class: "legend" }, "weight 0.01 % ", node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), " 100 %",
    ...(GATED ? [node("span", {}, node("span", { class: "line" }), "boundary"), node("span", {}, node("span", { class: "line thin" }), "first kept key"),
      node("span", {}, node("span", { class: "swatch pruned" }), "pruned")] : []),
    node("span", { id: "faint" }, node("span", { class: "swatch", style: `background: ${heat(0.5)}; opacity: ${FAINT}` }), "mean of all weaker keys"));
}
const attentionNumbers = head => [["query", "key", "distance", "weight", "rounded_by_up_to", ...(GATED ? ["qk_nats", "decay_nats"] : [])], d3.range(0, text.length, head.model.stride).flatMap(i => head.keysOf(i).keys.map(k => [k.query, k.key, k.distance, k.weight.toFixed(4), roundedBy(k.weight).toFixed(4), ...(GATED ? [k.logit?.toFixed(2), k.decay.toFixed(2)] : [])]))];
const distanceNumbers = head => [["from_tokens", "to_tokens", "weight"], [...head.byDistance].map((v, i) => [head.model.bins[i], head.model.bins[i + 1] - 1, v.toPrecision(4)])];

// The range of tokens that a scale shows, including partly visible ones.
const tokensIn = (scale, side, T) => [Math.max(0, Math.floor(scale.invert(0) + 1e-6)), Math.min(T, Math.ceil(scale.invert(side) - 1e-6))];

const attention = {};
function drawAttention(head) {
  const { model } = head, T = model.length, place = $("#attention");
  const narrow = isNarrow(), left = narrow ? 40 : 54, right = narrow ? 4 : 10, strip = 40, gap = 18, strips = 2 * (strip + gap) * GATED;
  // The figure and its legend fit into the window; on a phone the matrix comes first and the gates below it.
  const wide = Math.max(280, place.clientWidth) - left - right, side = narrow ? wide : Math.min(wide, 700, Math.max(340, innerHeight - 370));
  const width = side + left + right, top = (narrow ? 0 : strips) + 20;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const canvas = node("canvas", { width: side * ratio, height: side * ratio, style: `left: ${left}px; top: ${top}px; width: ${side}px; height: ${side}px`, "aria-hidden": "true" });
  const svg = d3.create("svg").attr("width", width);
  place.replaceChildren(canvas, svg.node());
  const x0 = d3.scaleLinear([0, T], [0, side]);
  for (const [id, line] of [["clip", 0], ["strip-clip", 2]]) svg.append("clipPath").attr("id", id).append("rect").attr("y", -line).attr("width", side).attr("height", side + line);
  const group = (y, name) => svg.append("g").attr("class", name).attr("transform", `translate(${left},${y})`);
  const under = narrow ? top + side + 90 : 14, gates = group(under, "gates"), sums = group(under + strip + gap, "sums"), heatmap = group(top, "heatmap");
  for (const [strip_, says] of !GATED ? [] : [[gates, "forget gate f"], [sums, "running sum c of log f"]]) {
    strip_.append("text").attr("class", "axis").attr("x", 2).attr("y", -4).text(says);
    strip_.append("g").attr("class", "yaxis");
    for (const name of ["band", "curve"]) strip_.append("path").attr("class", name).attr("clip-path", "url(#strip-clip)");
  }
  const over = heatmap.append("g").attr("clip-path", "url(#clip)");
  const pruned = over.append("path").attr("class", "pruned"), edge = over.append("path").attr("class", "boundary");
  const kept = over.append("path").attr("class", "first-kept"), chosen = over.append("g");
  heatmap.append("rect").attr("class", "frame").attr("width", side).attr("height", side);
  const xAxis = heatmap.append("g").attr("class", "axes").attr("transform", `translate(0,${side})`), yAxis = heatmap.append("g").attr("class", "axes");
  const keyTitle = heatmap.append("text").attr("class", "axis").attr("x", side / 2).attr("text-anchor", "middle").text("key (tokens from the start)");
  heatmap.append("text").attr("class", "axis").attr("x", -9).attr("y", -12).attr("text-anchor", "end").text("query");
  const pointer = heatmap.append("rect").attr("class", "pointer").attr("width", side).attr("height", side);
  const painter = squaresPainter(head), ticks = width < 500 ? 4 : 6;
  let x = x0, y = x0, hovered = null;
  const say = () => {
    const square = hovered ?? (readSquare?.query === state.token ? readSquare : null);
    $("#readout").textContent = square ? describe(head, square, painter, side) : "Point at or tap a square of the matrix to see its query, its key, the weight and the scores.";
  };

  function redraw() {
    const [from, to] = tokensIn(x, side, T), [first, last] = tokensIn(y, side, T), every = Math.ceil((last - first) / (2 * side));
    painter.paint(canvas, ratio, x, y, side);
    $("#faint").hidden = !painter.near(side);
    // At high zoom, the tick labels are the tokens.
    const words = shownPart.tokens <= side / 13;
    const reads = (axis, scale) => {
      const [start, end] = scale.domain();
      return words ? axis(scale).tickValues(d3.range(Math.ceil(start - 1e-6), Math.min(T, Math.floor(end + 1e-6))).map(i => i + 0.5)).tickFormat(v => readable(text.piece(Math.floor(v))).slice(0, 8)).tickSize(3) : axis(scale).ticks(ticks);
    };
    xAxis.call(reads(d3.axisBottom, x)).selectAll("text").attr("transform", words ? "rotate(-50) translate(-4,-5)" : null).attr("text-anchor", words ? "end" : "middle");
    yAxis.call(reads(d3.axisLeft, y));
    const bottom = top + side + (words ? 72 : 40), height = narrow ? under + strips : bottom;
    svg.attr("viewBox", `0 0 ${width} ${height}`).attr("height", height);
    place.style.height = `${height}px`;
    keyTitle.attr("y", bottom - top - 6);
    heatmap.selectAll(".axes .domain").remove();
    const [blockQ] = model.grid, steps = [];
    head.boundary.forEach((_, m) => {
      const key = x(head.firstOfBlocks(m * blockQ));
      steps.push([key, y(m * blockQ)], [key, y(Math.min(T, (m + 1) * blockQ))]);
    });
    edge.attr("d", d3.line()(steps));
    pruned.attr("d", `${d3.line()([[x(0), y(0)], ...steps, [x(0), y(T)]])}Z`);
    // The first kept key is non-decreasing, so one query per half pixel suffices.
    kept.attr("d", d3.line(i => x(head.firstKept[Math.min(i, T - 1)]), y).curve(d3.curveStepBefore)(d3.range(first, last + 1, every)));
    if (GATED) drawStrip(gates, i => head.gate(i), [0, 1], from, to, x, strip, side, d3.format(".1~f"));
    if (GATED) drawStrip(sums, i => head.c[i], null, from, to, x, strip, side, null);
    chosen.selectAll("*").remove();
    if (state.token != null) {
      const middle = y(state.token + 0.5), { keys } = head.keysOf(state.token);
      chosen.append("line").attr("class", "query").attr("x1", x(0)).attr("x2", x(state.token + 0.5)).attr("y1", middle).attr("y2", middle);
      chosen.selectAll("circle").data(keys).join("circle").attr("class", "key").attr("cx", k => x(k.key + 0.5)).attr("cy", middle).attr("r", k => 2 + 5 * Math.sqrt(k.weight));
    }
    if (GATED) { drawDecay(head, steps, x, y, side, (px, py) => read(place_(px, py))); sayPruning(head); }
    say();
  }
  const least = Math.min(T, 24), within = (v, low, high) => Math.max(low, Math.min(high, v));
  const zooming = d3.zoom().scaleExtent([1, T / least]).translateExtent([[0, 0], [side, side]]).extent([[0, 0], [side, side]])
    .filter(event => (event.type === "wheel" ? event.ctrlKey || event.metaKey : event.touches ? event.touches.length > 1 : !event.button))
    .on("zoom", ({ transform }) => {
      [x, y] = [transform.rescaleX(x0), transform.rescaleY(x0)];
      shownPart = { key: x.invert(0), query: y.invert(0), tokens: T / transform.k };
      attention.part = shownPart;
      redraw();
      if (attention.head === head) writeAddress();
    });
  const show = part => {
    const tokens = within(part.tokens, least, T), at = v => -x0(within(v, 0, T - tokens));
    pointer.call(zooming.transform, d3.zoomIdentity.scale(T / tokens).translate(at(part.key), at(part.query)));
  };
  const centre = (key, query, wanted) => {
    const tokens = within(wanted, least, T);
    show({ key: Math.round(key - tokens / 2), query: Math.round(query - tokens / 2), tokens });
  };
  const sees = (v, first) => v >= first && v < first + shownPart.tokens;
  // Zooms to the clicked square or the diagonal of the selected query if visible, otherwise to the centre.
  attention.zoomBy = factor => {
    hovered = null; // the square below a resting pointer has changed
    const { key, query, tokens } = shownPart, i = state.token, onto = factor && i != null && sees(i, query);
    const column = onto ? [readSquare?.query === i ? readSquare.key : i, i].find(j => sees(j, key)) : undefined;
    centre(column === undefined ? key + tokens / 2 : column + 0.5, onto ? i + 0.5 : query + tokens / 2, factor ? tokens / factor : T);
  };
  attention.redraw = redraw;
  attention.head = null; // prevents address updates until the drawing is complete
  attention.choose = () => {
    // A token that was selected in another view is scrolled into view.
    if (state.token != null && state.token !== attention.token && !sees(state.token, shownPart.query)) centre(state.token, state.token, shownPart.tokens);
    else redraw();
    attention.token = state.token;
    showQuery(head);
  };
  const place_ = (px, py) => ({ key: within(Math.floor(x.invert(px)), 0, T - 1), query: within(Math.floor(y.invert(py)), 0, T - 1) });
  const at = event => place_(...d3.pointer(event, pointer.node())), read = square => { readSquare = square; change({ token: square.query }); };
  attention.token = state.token; // a link determines the visible part; its token does not move it
  pointer.call(zooming);
  show(shownPart);
  attention.choose();
  attention.head = head;
  // One finger pans after a sideways start; vertical moves scroll the page (touch-action). D3 handles two fingers.
  let finger = null, sideways = false;
  pointer.on("pointerdown", event => { finger = event.pointerType === "touch" && event.isPrimary ? d3.pointer(event) : null; sideways = false; })
    .on("pointerup pointercancel", () => { finger = null; })
    .on("touchmove", event => { if (sideways && event.cancelable) event.preventDefault(); }) // prevents a fling, which would swallow the next tap
    .on("pointermove", event => {
      if (event.pointerType !== "touch") { hovered = at(event); say(); }
      if (!finger) return;
      const now = d3.pointer(event), [dx, dy] = now.map((v, i) => v - finger[i]), scale = shownPart.tokens / T;
      sideways ||= Math.abs(dx) > Math.abs(dy);
      if (sideways) pointer.call(zooming.translateBy, dx * scale, dy * scale);
      finger = sideways ? now : null;
    })
    .on("pointerleave", () => { hovered = null; say(); })
    .on("click", event => read(at(event)));
  place.onkeydown = event => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }, zooms = { "+": 2, "=": 2, "-": 0.5, "0": 0 };
    if (event.key in moves) pointer.call(zooming.translateBy, ...moves[event.key].map(v => v * shownPart.tokens / T));
    else if (event.key in zooms) attention.zoomBy(zooms[event.key]);
    else return;
    event.preventDefault();
  };
}

// The table of the selected query and its keys, beside the matrix.
function showQuery(head) {
  const i = state.token;
  if (i == null) return $("#query").replaceChildren();
  const { query, keys } = head.keysOf(i), { stride } = head.model;
  $("#query").replaceChildren(
    node("p", {}, node("strong", {}, `Query ${whole(query)} `), node("code", {}, readable(text.piece(query))), stride > 1 ? ` and its strongest keys (one in ${stride} tokens has a list)` : " and its strongest keys"),
    splitTable(head, keys), node("button", { type: "button", onclick: () => change({ view: "text" }) }, "Show in the text"));
}
// The scores of a query's keys in two parts: the weight is the softmax of q.k + D.
function splitTable(head, keys) {
  const gated = head.logits.length, heads = ["key", "distance", "weight", ...(gated ? ["q·k", "D", "q·k + D"] : [])];
  const table = node("table", { class: "split" }, node("thead", {}, node("tr", {}, ...heads.map(h => node("th", { scope: "col" }, h)))),
    node("tbody", {}, ...keys.map(k => node("tr", { class: k.kept ? "" : "past" }, node("td", {}, node("code", {}, readable(text.piece(k.key))), k.kept ? "" : " pruned"), node("td", {}, k.distance ? whole(k.distance) : "itself"), node("td", {}, node("strong", {}, weightText(k.weight))),
      ...(gated ? [k.logit, k.decay, k.logit === null ? null : k.logit + k.decay].map(v => node("td", {}, v === null ? "–" : nats(v))) : [])))));
  const says = gated ? node("p", { class: "quiet" }, `Scores in nats. Blocks whose largest D is below the threshold δ = ${nats(head.threshold)} are pruned. |q·k| is at most U = ${head.row.logit_bound.toFixed(1)}.`) : null;
  return node("div", { class: "scroll" }, table, says ?? "");
}

// Describes a square in a sentence: query, key, weight and scores.
function describe(head, { key, query }, painter, side) {
  const { cell, length, stride, leastWeight } = head.model, gated = head.c.length;
  if (key > query) return "Above the diagonal: the causal mask hides later tokens from a query.";
  const start = head.firstOfBlocks(query), isPruned = key < start, listed = head.keysOf(query);
  const m = Math.floor(query / cell), n = Math.floor(key / cell), ends = v => [v * cell, Math.min(length, (v + 1) * cell) - 1], named = (what, v) => (cell > 1 ? `${what} ${ends(v).map(whole).join("–")}` : `${what} ${whole(v)}`);
  const weight = head.square(m, n);
  if (!painter.single(side)) {
    const d = gated ? head.decay(m * cell, Math.min(m * cell, ends(n)[1])) : null;
    return `${named("Queries", m)} give ${weight < HEAT_FLOOR ? "less than 0.01\u00a0%" : weightText(weight)} of their weight to ${named("keys", n)}.${gated ? ` Their largest D is ${nats(d)} nats${isPruned ? `; the block is pruned, because its largest D is below δ = ${nats(head.threshold)}` : ""}.` : ""}`;
  }
  const one = listed.query === query ? listed.keys.find(k => k.key === key) : undefined;
  const back = query === key ? "itself" : `“${readable(text.piece(key))}” (key ${whole(key)}, ${counted(query - key, "token")} back)`;
  const much = one ? weightText(one.weight) : listed.query === query ? `less than ${percent(Math.min(listed.keys.at(-1).weight, listed.keys.length < 8 ? leastWeight : 1))}` : `an unlisted part (only one in ${stride} queries has a list)`;
  const why = !gated ? "" : one?.logit != null ? ` Its score is q·k ${nats(one.logit)} + D ${nats(one.decay)} = ${nats(one.logit + one.decay)} nats.` : ` D is ${nats(head.decay(query, key))} nats.`;
  const verdict = !gated ? "" : isPruned ? ` The key’s block is pruned, because its largest D is below δ = ${nats(head.threshold)}.` : head.decay(query, key) < head.threshold ? ` D is below δ = ${nats(head.threshold)}, but the largest D of the block is not, so the block is kept.` : ` D is at least δ = ${nats(head.threshold)}, so ACP keeps the key.`;
  return `“${readable(text.piece(query))}” (query ${whole(query)}) gives ${much} of its weight to ${back}.${why}${verdict}`;
}

// An image with one pixel per square.
function squaresImage(head, each) {
  const N = Math.ceil(head.model.length / head.model.cell), picture = node("canvas", { width: N, height: N }), context = picture.getContext("2d"), image = context.createImageData(N, N);
  const colours = d3.range(256).map(t => d3.rgb(heat(t / 255)));
  for (let m = 0; m < N; m++)
    for (let n = 0; n <= m; n++) {
      const { r, g, b } = colours[Math.round(255 * Math.min(1, heatScale(Math.max(1e-9, each(m, n)))))];
      image.data.set([r, g, b, 255], 4 * (m * N + n));
    }
  context.putImageData(image, 0, 0);
  return picture;
}

// Paints the attention as squares; at high zoom, single keys on top of the squares.
function squaresPainter(head) {
  const { cell, length: T, stride } = head.model, N = Math.ceil(T / cell), rows = m => Math.min(cell, T - m * cell);
  const make = each => squaresImage(head, each);
  // The weight of a square without its listed keys; a rest below 3 % may be rounding.
  let listed = null;
  const unlisted = (m, n) => {
    if (!listed) {
      listed = new Float64Array(N * N);
      for (let i = 0; i < T; i += stride)
        for (const { query, key, weight } of head.keysOf(i).keys) listed[Math.floor(query / cell) * N + Math.floor(key / cell)] += weight * stride / rows(Math.floor(query / cell));
    }
    const all = head.square(m, n), rest = all - listed[m * N + n];
    return rest > 0.03 * all ? rest : 0;
  };
  let far = null, near = null;
  const single = side => shownPart.tokens <= 1.5 * side, isNear = side => cell > 1 && single(side);
  return {
    near: isNear, single,
    paint(canvas, ratio, x, y, side) {
      const context = canvas.getContext("2d"), closer = isNear(side);
      // On the diagonal, half of the (query, key) pairs of a square are masked.
      const picture = closer ? (near ??= make((m, n) => unlisted(m, n) / (m === n ? (rows(m) + 1) / 2 : cell))) : (far ??= make((m, n) => head.square(m, n)));
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, side, side);
      context.imageSmoothingEnabled = false;
      const [first, last] = tokensIn(y, side, T);
      const diagonal = single(side) ? d3.range(first, last).flatMap(i => [[i + 1, i], [i + 1, i + 1]]) : [[1, 0], [T, T - 1], [T, T]];
      context.save(); // clips to the causal triangle
      context.beginPath();
      for (const [key, query] of [[0, diagonal[0][1]], ...diagonal, [0, diagonal.at(-1)[1]]]) context.lineTo(x(key), y(query));
      context.clip();
      context.globalAlpha = closer ? FAINT : 1;
      context.drawImage(picture, x(0), y(0), x(N * cell) - x(0), y(N * cell) - y(0));
      context.globalAlpha = 1;
      if (closer)
        for (let i = first; i < last; i++) {
          const { query, keys } = head.keysOf(i);
          if (query !== i) continue;
          for (const { key, weight } of keys) {
            context.fillStyle = heat(heatScale(weight));
            context.fillRect(x(key), y(i), Math.max(1, x(1) - x(0)), Math.max(1, y(1) - y(0)));
          }
        }
      context.restore();
    },
  };
}

// A curve with the minimum, maximum and mean of each pixel column.
function drawStrip(group, value, domain, from, to, x, height, side, format) {
  const columns = Math.min(Math.ceil(side), Math.max(1, to - from)), low = [], mean = [];
  for (let p = 0; p < columns; p++) {
    const first = from + Math.floor(p * (to - from) / columns), last = Math.max(first + 1, from + Math.floor((p + 1) * (to - from) / columns));
    let least = Infinity, most = -Infinity, sum = 0;
    for (let i = first; i < last; i++) { const v = value(i); sum += v; if (v < least) least = v; if (v > most) most = v; }
    low.push({ at: x((first + last) / 2), least, most, mean: sum / (last - first) });
  }
  const y = d3.scaleLinear(domain ?? [d3.min(low, d => d.least), d3.max(low, d => d.most)], [height, 0]);
  group.select(".band").attr("d", d3.area(d => d.at, d => y(d.least), d => y(d.most))(low));
  group.select(".curve").attr("d", d3.line(d => d.at, d => y(d.mean))(low));
  group.select(".yaxis").call(d3.axisLeft(y).ticks(2).tickFormat(format ?? y.tickFormat(2))).select(".domain").remove();
}

// The weight by distance of one head, or of two heads for comparison.
function drawDistance(place, heads) {
  const { bins } = heads[0].model, width = Math.max(260, Math.min(460, place.clientWidth)), height = 230, left = 46, bottom = 36;
  const x = d3.scaleLog([1, bins.at(-1) + 1], [left, width - 10]), at = i => x(bins[i] + 1);
  // Bins of few tokens have unequal widths on this scale, so the height is the weight per doubling of the distance.
  const shares = heads.map(head => [...head.byDistance]), dense = (v, i) => v / Math.log2((bins[i + 1] + 1) / (bins[i] + 1));
  const y = d3.scaleLinear([0, d3.max(shares.flatMap(share => share.map(dense)))], [height - bottom, 12]).nice(4);
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", heads.map(h => `${headName(h.row)}: half of the weight is within ${h.row.half_weight_tokens} tokens`).join("; "));
  svg.append("g").attr("class", "axes").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(4).tickFormat(v => `${d3.format(".0~f")(100 * v)} %`)).select(".domain").remove();
  const names = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144].filter(v => v < bins.at(-1));
  svg.append("g").attr("class", "axes").attr("transform", `translate(0,${height - bottom})`)
    .call(d3.axisBottom(x).tickValues(names.map(v => v + 1)).tickFormat(v => d3.format(".3~s")(v - 1).replace(/^(\d+)\.\d*k$/, "$1k")));
  svg.append("text").attr("class", "axis").attr("x", (left + width) / 2).attr("y", height - 4).attr("text-anchor", "middle").text("distance of the key (tokens)");
  shares.forEach((share, which) => {
    const bars = svg.append("g").attr("class", `bars of${which}`);
    if (heads.length > 1) svg.append("path").attr("class", `step of${which}`).attr("d", d3.line()(share.flatMap((v, i) => [[at(i), y(dense(v, i))], [at(i + 1), y(dense(v, i))]])));
    bars.selectAll("rect").data(share).join("rect").attr("x", (_, i) => at(i)).attr("width", (_, i) => Math.max(1, at(i + 1) - at(i) - (heads.length > 1 ? 0 : 0.6)))
      .attr("y", (v, i) => y(dense(v, i))).attr("height", (v, i) => y(0) - y(dense(v, i)))
      .on("pointermove", (event, v) => {
        const i = share.indexOf(v);
        showTip(event, `distance ${whole(bins[i])}${bins[i + 1] - 1 > bins[i] ? `–${whole(bins[i + 1] - 1)}` : ""}: ${percent(v)}`);
      }).on("pointerleave", hideTip);
  });
  if (heads.length === 1) {
    const { row } = heads[0], marks = [[row.half_weight_tokens, "median distance"], ...(GATED && row.kind !== "global" ? [[row.median_window_tokens - 1, "effective context p50"]] : [])];
    marks.forEach(([tokens, says], i) => {
      const px = x(Math.min(tokens + 1, bins.at(-1)) + 1), left_ = px > width - 140;
      svg.append("line").attr("class", "mark").attr("x1", px).attr("x2", px).attr("y1", 4 + 13 * i).attr("y2", height - bottom);
      svg.append("text").attr("class", "axis").attr("x", px + (left_ ? -4 : 4)).attr("y", 12 + 13 * i).attr("text-anchor", left_ ? "end" : "start").text(says);
    });
  }
  place.replaceChildren(svg.node());
}
