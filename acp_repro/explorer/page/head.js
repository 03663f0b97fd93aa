"use strict";
// One head: gates and their running sum along the text, attention with its boundary, weight by distance.

const headView = { id: "head", name: "Head", draw: drawHeadView };
// What the picture shows, in tokens: it stays from head to head and when the window changes its size.
let shownPart = { key: 0, query: 0, tokens: Infinity };
let readSquare = null; // the key and the query that were clicked last

async function drawHeadView(section, before) {
  const wanted = currentRow(), head = await currentHead();
  await text.ready;
  if (state.view !== "head" || wanted !== currentRow()) return;
  // Another query of the same head: the picture stays, and the focus with it.
  if (before?.view === "head" && attention.head === head) return attention.choose();
  const focused = document.activeElement?.id === "attention";
  const w = wanted, kinds = { local: "A local head", global: "A global head", between: "A head between local and global" };
  const says = !GATED ? `Half of the queries give 99 % of their weight to ${counted(w.keys_99, "key")} or fewer, and half of the head's weight lies within ${counted(w.half_weight_tokens, "token")}.` : `${kinds[w.kind] ?? "A head at a length where no block can be pruned"}: half of its queries keep ${counted(w.median_window_tokens, "key")} or fewer, `
    + `${w.half_weight_tokens ? `half of its weight lies within ${counted(w.half_weight_tokens, "token")}` : "half of its weight or more lies on the token itself"}, and its mean gate is ${w.mean_forget_gate.toFixed(3)}.`;
  section.replaceChildren(
    node("p", { class: "lead" }, says),
    node("div", { class: "columns wide-left" },
      figure("Attention along the text", null,
        node("div", { class: "controls" },
          zoomButton("+", "Closer", 2), zoomButton("−", "Further away", 0.5), zoomButton("whole", "The whole text", 0),
          node("span", { class: "quiet" }, "click or tap to read; drag to move (a finger: sideways first); pinch, Ctrl + wheel or + and − to zoom")),
        node("div", { id: "attention", tabindex: 0, role: "group", "aria-label": "Attention of this head: plus and minus zoom, arrows move, 0 shows the whole text" }),
        heatLegend(head),
        saveButtons(rowFile("attention"), () => $("#attention svg"), () => attentionNumbers(head))),
      node("div", {},
        node("div", { id: "reading", "aria-live": "polite" }, node("p", { id: "readout" }), node("div", { id: "query" })),
        figure("Weight by distance", "How far back the weight goes, mean of all queries. A bar’s area is its share; its height is the weight for each doubling of the distance.", node("div", { id: "distance" }),
          saveButtons(rowFile("distance"), () => $("#distance svg"), () => distanceNumbers(head))),
        figure("This head", null, facts(w)))));
  drawAttention(head);
  drawDistance($("#distance"), [head]);
  if (focused) $("#attention").focus({ preventScroll: true });
}

function facts(row) {
  return node("dl", { class: "facts" }, ...Object.entries(COLUMNS).flatMap(([key, column]) => [
    node("dt", { title: column.says }, column.name), node("dd", {}, column.text(row[key]), node("span", { class: "quiet" }, ` · ${column.says}`))]));
}
function zoomButton(sign, says, factor) {
  return node("button", { type: "button", "aria-label": says, title: says, onclick: () => attention.zoomBy(factor) }, sign);
}
const HEAT_FLOOR = 1e-4;
const FAINT = 0.35; // opacity of what is spread, so that it looks like no listed key
const heatScale = v => Math.max(0, 1 - Math.log(v) / Math.log(HEAT_FLOOR));
function heatLegend(head) {
  const stops = d3.range(0, 1.01, 0.1).map(heat), bounded = head.boundary.some(n => n);
  return node("p", { class: "legend" }, "share of a query’s weight: 0.01 % ", node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), " 100 %",
    ...(bounded ? [node("span", {}, node("span", { class: "line" }), "boundary, in blocks"), node("span", {}, node("span", { class: "line thin" }), "first kept key, query by query"),
      node("span", {}, node("span", { class: "swatch pruned" }), "pruned")] : []),
    node("span", { id: "faint" }, node("span", { class: "swatch", style: `background: ${heat(0.5)}; opacity: ${FAINT}` }), "faint: what is left of a square beside its listed keys, spread evenly"),
    node("span", {}, "Weights are rounded: a key’s to within 0.4 points, a square’s to within 3 % of itself."));
}
const attentionNumbers = head => [["query", "key", "distance", "weight", "rounded_by_up_to"], d3.range(0, text.length, head.model.stride).flatMap(i => head.keysOf(i).keys.map(k => [k.query, k.key, k.distance, k.weight.toFixed(4), roundedBy(k.weight).toFixed(4)]))];
const distanceNumbers = head => [["from_tokens", "to_tokens", "weight"], [...head.byDistance].map((v, i) => [head.model.bins[i], head.model.bins[i + 1] - 1, v.toPrecision(4)])];

// The tokens that a scale shows, also in part.
const tokensIn = (scale, side, T) => [Math.max(0, Math.floor(scale.invert(0) + 1e-6)), Math.min(T, Math.ceil(scale.invert(side) - 1e-6))];

const attention = {};
function drawAttention(head) {
  const { model } = head, T = model.length, place = $("#attention");
  const width = Math.max(280, Math.min(760, place.clientWidth)), left = 54, right = 10, strip = width < 500 ? 44 : 58, gap = 20;
  const side = width - left - right, top = 2 * (strip + gap) * GATED + 26;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const canvas = node("canvas", { width: side * ratio, height: side * ratio, style: `left: ${left}px; top: ${top}px; width: ${side}px; height: ${side}px`, "aria-hidden": "true" });
  const svg = d3.create("svg").attr("width", width);
  place.replaceChildren(canvas, svg.node());
  const x0 = d3.scaleLinear([0, T], [0, side]);
  for (const [id, line] of [["clip", 0], ["strip-clip", 2]]) svg.append("clipPath").attr("id", id).append("rect").attr("y", -line).attr("width", side).attr("height", side + line);
  const group = (y, name) => svg.append("g").attr("class", name).attr("transform", `translate(${left},${y})`);
  const gates = group(14, "gates"), sums = group(14 + strip + gap, "sums"), heatmap = group(top, "heatmap");
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
    $("#readout").textContent = square ? describe(head, square, painter, side) : "Point at a square, or tap it, to read it.";
  };

  function redraw() {
    const [from, to] = tokensIn(x, side, T), [first, last] = tokensIn(y, side, T), every = Math.ceil((last - first) / (2 * side));
    painter.paint(canvas, ratio, x, y, side);
    $("#faint").hidden = !painter.near(side);
    // Close enough, the axes read the text.
    const words = shownPart.tokens <= side / 13;
    const reads = (axis, scale) => {
      const [start, end] = scale.domain();
      return words ? axis(scale).tickValues(d3.range(Math.ceil(start - 1e-6), Math.min(T, Math.floor(end + 1e-6))).map(i => i + 0.5)).tickFormat(v => readable(text.piece(Math.floor(v))).slice(0, 8)).tickSize(3) : axis(scale).ticks(ticks);
    };
    xAxis.call(reads(d3.axisBottom, x)).selectAll("text").attr("transform", words ? "rotate(-50) translate(-4,-5)" : null).attr("text-anchor", words ? "end" : "middle");
    yAxis.call(reads(d3.axisLeft, y));
    const height = top + side + (words ? 62 : 40);
    svg.attr("viewBox", `0 0 ${width} ${height}`).attr("height", height);
    place.style.height = `${height}px`;
    keyTitle.attr("y", height - top - 6);
    heatmap.selectAll(".axes .domain").remove();
    const [blockQ] = model.grid, steps = [];
    head.boundary.forEach((_, m) => {
      const key = x(head.firstOfBlocks(m * blockQ));
      steps.push([key, y(m * blockQ)], [key, y(Math.min(T, (m + 1) * blockQ))]);
    });
    edge.attr("d", d3.line()(steps));
    pruned.attr("d", `${d3.line()([[x(0), y(0)], ...steps, [x(0), y(T)]])}Z`);
    // The first kept key never moves back, so one query for each half pixel is enough.
    kept.attr("d", d3.line(i => x(head.firstKept[Math.min(i, T - 1)]), y).curve(d3.curveStepBefore)(d3.range(first, last + 1, every)));
    if (GATED) drawStrip(gates, i => head.gate(i), [0, 1], from, to, x, strip, side, d3.format(".1~f"));
    if (GATED) drawStrip(sums, i => head.c[i], null, from, to, x, strip, side, null);
    chosen.selectAll("*").remove();
    if (state.token != null) {
      const middle = y(state.token + 0.5), { keys } = head.keysOf(state.token);
      chosen.append("line").attr("class", "query").attr("x1", x(0)).attr("x2", x(state.token + 0.5)).attr("y1", middle).attr("y2", middle);
      chosen.selectAll("circle").data(keys).join("circle").attr("class", "key").attr("cx", k => x(k.key + 0.5)).attr("cy", middle).attr("r", k => 2 + 5 * Math.sqrt(k.weight));
    }
    say();
  }
  const least = Math.min(T, 24), within = (v, low, high) => Math.max(low, Math.min(high, v));
  const zooming = d3.zoom().scaleExtent([1, T / least]).translateExtent([[0, 0], [side, side]]).extent([[0, 0], [side, side]])
    .filter(event => (event.type === "wheel" ? event.ctrlKey || event.metaKey : event.touches ? event.touches.length > 1 : !event.button))
    .on("zoom", ({ transform }) => {
      [x, y] = [transform.rescaleX(x0), transform.rescaleY(x0)];
      shownPart = { key: x.invert(0), query: y.invert(0), tokens: T / transform.k };
      redraw();
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
  // Onto the square that was clicked, or the chosen query's own, while it is in view; else onto the middle.
  attention.zoomBy = factor => {
    hovered = null; // the square under a pointer that does not move is another one now
    const { key, query, tokens } = shownPart, i = state.token, onto = factor && i != null && sees(i, query);
    const column = onto ? [readSquare?.query === i ? readSquare.key : i, i].find(j => sees(j, key)) : undefined;
    centre(column === undefined ? key + tokens / 2 : column + 0.5, onto ? i + 0.5 : query + tokens / 2, factor ? tokens / factor : T);
  };
  attention.head = head;
  attention.choose = () => {
    // A token that was chosen elsewhere, as in the text, comes into view.
    if (state.token != null && state.token !== attention.token && !sees(state.token, shownPart.query)) centre(state.token, state.token, shownPart.tokens);
    else redraw();
    attention.token = state.token;
    showQuery(head);
  };
  pointer.call(zooming);
  show(shownPart);
  attention.choose();

  const at = event => {
    const [key, query] = d3.pointer(event, pointer.node()).map((v, i) => within(Math.floor([x, y][i].invert(v)), 0, T - 1));
    return { key, query };
  };
  // One finger moves the picture from a sideways start; up and down is the page's (touch-action). Two are D3's.
  let finger = null, sideways = false;
  pointer.on("pointerdown", event => { finger = event.pointerType === "touch" && event.isPrimary ? d3.pointer(event) : null; sideways = false; })
    .on("pointerup pointercancel", () => { finger = null; })
    .on("touchmove", event => { if (sideways && event.cancelable) event.preventDefault(); }) // no fling, which would swallow the next tap
    .on("pointermove", event => {
      if (event.pointerType !== "touch") { hovered = at(event); say(); }
      if (!finger) return;
      const now = d3.pointer(event), [dx, dy] = now.map((v, i) => v - finger[i]), scale = shownPart.tokens / T;
      sideways ||= Math.abs(dx) > Math.abs(dy);
      if (sideways) pointer.call(zooming.translateBy, dx * scale, dy * scale);
      finger = sideways ? now : null;
    })
    .on("pointerleave", () => { hovered = null; say(); })
    .on("click", event => { readSquare = at(event); change({ token: readSquare.query }); });
  place.onkeydown = event => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }, zooms = { "+": 2, "=": 2, "-": 0.5, "0": 0 };
    if (event.key in moves) pointer.call(zooming.translateBy, ...moves[event.key].map(v => v * shownPart.tokens / T));
    else if (event.key in zooms) attention.zoomBy(zooms[event.key]);
    else return;
    event.preventDefault();
  };
}

// The chosen query and its keys, beside the picture.
function showQuery(head) {
  const i = state.token;
  if (i == null) return $("#query").replaceChildren();
  const { query, keys } = head.keysOf(i), { stride } = head.model;
  $("#query").replaceChildren(
    node("p", {}, node("strong", {}, `Query ${whole(query)} `), node("code", {}, readable(text.piece(query))), stride > 1 ? ` looks most at (every ${stride}th token has a list)` : " looks most at"),
    node("ol", { class: "looks" }, ...keys.map(k => node("li", {}, node("strong", {}, weightText(k.weight)), " ", node("code", {}, readable(text.piece(k.key))),
      node("span", { class: "quiet" }, ` ${k.distance ? `${whole(k.distance)} back` : "itself"}${k.kept ? "" : ", pruned"}`)))),
    node("button", { type: "button", onclick: () => change({ view: "text" }) }, "Read it in the text"));
}

function describe(head, { key, query }, painter, side) {
  const { cell, cellFloor, length, stride, leastWeight } = head.model;
  if (key > query) return "Above the diagonal: a query sees no later token.";
  const state_ = key < head.firstOfBlocks(query) ? ", pruned" : "", listed = head.keysOf(query), near = painter.near(side);
  const about = (v, word) => (v < HEAT_FLOOR ? "under 0.01\u00a0%" : `${word} ${weightText(v)}`);
  const m = Math.floor(query / cell), n = Math.floor(key / cell), named = (what, v) => `${what} ${whole(v * cell)}–${whole(Math.min(length, (v + 1) * cell) - 1)}`;
  const says = `${named("Queries", m)} give ${about(head.square(m, n), "about")} to ${named("keys", n)}${state_}.`;
  if (!near) return says;
  if (listed.query !== query) return `Only every ${stride}th query has a list of keys. ${says}`;
  const one = listed.keys.find(k => k.key === key), last = listed.keys.at(-1).weight;
  // Eight are listed at most; with fewer, all others are under the least weight of a list. No key gets more than its whole square.
  const most = Math.min(listed.keys.length < 8 ? Math.min(last, leastWeight) : last, 1.03 * cell * Math.max(cellFloor, head.square(m, n)));
  const weight = one ? weightText(one.weight) : about(most, "at most");
  const pair = `Query ${whole(query)} “${readable(text.piece(query))}” gives ${weight} to key ${whole(key)} “${readable(text.piece(key))}”, ${whole(query - key)} back${state_}.`;
  const rest = one ? 0 : painter.unlisted(m, n);
  return rest ? `${pair} ${named("Queries", m)} give ${about(rest, "about")} to ${named("keys", n)} beside what is listed: the faint squares spread it evenly.` : pair;
}

// The attention in squares; closer, single keys on top of them.
function squaresPainter(head) {
  const { cell, length: T, stride } = head.model, N = Math.ceil(T / cell), rows = m => Math.min(cell, T - m * cell);
  const make = each => {
    const picture = node("canvas", { width: N, height: N }), context = picture.getContext("2d"), image = context.createImageData(N, N);
    for (let m = 0; m < N; m++)
      for (let n = 0; n <= m; n++) {
        const { r, g, b } = d3.rgb(heat(heatScale(Math.max(1e-9, each(m, n)))));
        image.data.set([r, g, b, 255], 4 * (m * N + n));
      }
    context.putImageData(image, 0, 0);
    return picture;
  };
  // What single keys leave of a square. Less than 3 % of it may be rounding.
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
    near: isNear, unlisted,
    paint(canvas, ratio, x, y, side) {
      const context = canvas.getContext("2d"), closer = isNear(side);
      // On the diagonal half of a square's keys are later than its queries.
      const picture = closer ? (near ??= make((m, n) => unlisted(m, n) / (m === n ? (rows(m) + 1) / 2 : cell))) : (far ??= make((m, n) => head.square(m, n)));
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, side, side);
      context.imageSmoothingEnabled = false;
      const [first, last] = tokensIn(y, side, T);
      const diagonal = single(side) ? d3.range(first, last).flatMap(i => [[i + 1, i], [i + 1, i + 1]]) : [[1, 0], [T, T - 1], [T, T]];
      context.save(); // nothing stands above the diagonal
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

// A curve as wide as its pixels: the least and the most of each column, and the mean.
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

// One curve a head; two heads are compared in it.
function drawDistance(place, heads) {
  const { bins } = heads[0].model, width = Math.max(260, Math.min(460, place.clientWidth)), height = 230, left = 46, bottom = 36;
  const x = d3.scaleLog([1, bins.at(-1) + 1], [left, width - 10]), at = i => x(bins[i] + 1);
  // Few whole tokens make bins of unequal width on this scale: what is drawn is the weight for each doubling of the distance.
  const shares = heads.map(head => [...head.byDistance]), dense = (v, i) => v / Math.log2((bins[i + 1] + 1) / (bins[i] + 1));
  const y = d3.scaleLinear([0, d3.max(shares.flatMap(share => share.map(dense)))], [height - bottom, 12]).nice(4);
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", heads.map(h => `${headName(h.row)}: half of the weight lies within ${h.row.half_weight_tokens} tokens`).join("; "));
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
        showTip(event, `${whole(bins[i])}${bins[i + 1] - 1 > bins[i] ? `–${whole(bins[i + 1] - 1)}` : ""} back: ${percent(v)}`);
      }).on("pointerleave", hideTip);
  });
  if (heads.length === 1) {
    const { row } = heads[0], marks = [[row.half_weight_tokens, "half of the weight"], ...(GATED ? [[row.median_window_tokens - 1, "window"]] : [])];
    marks.forEach(([tokens, says], i) => {
      const px = x(Math.min(tokens + 1, bins.at(-1)) + 1), left_ = px > width - 100;
      svg.append("line").attr("class", "mark").attr("x1", px).attr("x2", px).attr("y1", 4 + 13 * i).attr("y2", height - bottom);
      svg.append("text").attr("class", "axis").attr("x", px + (left_ ? -4 : 4)).attr("y", 12 + 13 * i).attr("text-anchor", left_ ? "end" : "start").text(says);
    });
  }
  place.replaceChildren(svg.node());
}
