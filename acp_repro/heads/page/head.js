"use strict";
// One head: gates and their running sum along the text, attention with its boundary, weight by distance.

const headView = { id: "head", name: "Head", draw: drawHeadView };
let zoom = d3.zoomIdentity; // stays from head to head, so that the same place can be compared

async function drawHeadView(section) {
  const wanted = currentRow(), head = await currentHead();
  await text.ready;
  if (state.view !== "head" || wanted !== currentRow()) return;
  const w = wanted, kinds = { local: "A local head", global: "A global head", between: "A head between local and global" };
  const says = `${kinds[w.kind] ?? "A head at a length where no block can be pruned"}: half of its queries keep ${counted(w.median_window_tokens, "key")} or fewer, `
    + `${w.half_weight_tokens ? `half of its weight lies within ${counted(w.half_weight_tokens, "token")}` : "half of its weight or more lies on the token itself"}, and its mean gate is ${w.mean_forget_gate.toFixed(3)}.`;
  section.replaceChildren(
    node("p", { class: "lead" }, says),
    node("div", { class: "columns wide-left" },
      figure("Attention along the text", null,
        node("div", { class: "controls" },
          zoomButton("+", "Closer", 2), zoomButton("−", "Further away", 0.5), zoomButton("whole", "The whole text", 0),
          node("span", { class: "quiet" }, "drag to move; pinch, Ctrl + wheel or + and − to zoom; click a query to read it")),
        node("div", { id: "attention", tabindex: 0, role: "group", "aria-label": "Attention of this head: plus and minus zoom, arrows move, 0 shows the whole text" }),
        node("p", { id: "readout", "aria-live": "polite" }, "Point at a square to read it."),
        heatLegend(),
        saveButtons(rowFile("attention"), () => $("#attention svg"), () => attentionNumbers(head))),
      node("div", {},
        figure("Weight by distance", "How far back the weight goes, mean of all queries. Bins are equally wide on this scale.", node("div", { id: "distance" }),
          saveButtons(rowFile("distance"), () => $("#distance svg"), () => distanceNumbers(head))),
        figure("This head", null, facts(w)))));
  drawAttention(head);
  drawDistance($("#distance"), [head]);
}

function facts(row) {
  return node("dl", { class: "facts" }, ...Object.entries(COLUMNS).flatMap(([key, column]) => [
    node("dt", { title: column.says }, column.name), node("dd", {}, column.text(row[key]), node("span", { class: "quiet" }, ` · ${column.says}`))]));
}
function zoomButton(sign, says, factor) {
  return node("button", { type: "button", "aria-label": says, title: says, onclick: () => attention.zoomBy(factor) }, sign);
}
const HEAT_FLOOR = 1e-4;
const heatScale = v => Math.max(0, 1 - Math.log(v) / Math.log(HEAT_FLOOR));
function heatLegend() {
  const stops = d3.range(0, 1.01, 0.1).map(heat);
  return node("p", { class: "legend" }, "share of a query’s weight: 0.01 % ", node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), " 100 %",
    node("span", {}, node("span", { class: "line" }), "boundary"), node("span", {}, node("span", { class: "swatch pruned" }), "pruned"));
}
const attentionNumbers = head => [["query", "key", "distance", "weight"], d3.range(0, text.length, head.model.stride).flatMap(i => head.keysOf(i).keys.map(k => [k.query, k.key, k.distance, k.weight.toFixed(4)]))];
const distanceNumbers = head => [["from_tokens", "to_tokens", "weight"], [...head.byDistance].map((v, i) => [head.model.bins[i], head.model.bins[i + 1] - 1, v.toPrecision(4)])];

const attention = {};
function drawAttention(head) {
  const { model } = head, T = model.length, place = $("#attention");
  const width = Math.max(280, Math.min(760, place.clientWidth)), left = 54, right = 10, strip = width < 500 ? 44 : 58, gap = 20;
  const side = width - left - right, top = 2 * (strip + gap) + 14, height = top + side + 62;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const canvas = node("canvas", { width: side * ratio, height: side * ratio, style: `left: ${left}px; top: ${top}px; width: ${side}px; height: ${side}px`, "aria-hidden": "true" });
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height);
  place.replaceChildren(canvas, svg.node());
  place.style.height = `${height}px`;
  const x0 = d3.scaleLinear([0, T], [0, side]), clip = svg.append("clipPath").attr("id", "clip");
  clip.append("rect").attr("width", side).attr("height", side);
  const group = (y, name) => svg.append("g").attr("class", name).attr("transform", `translate(${left},${y})`);
  const gates = group(14, "gates"), sums = group(14 + strip + gap, "sums"), heatmap = group(top, "heatmap");
  for (const [strip_, says] of [[gates, "forget gate f"], [sums, "running sum c of log f"]]) {
    strip_.append("text").attr("class", "axis").attr("x", 2).attr("y", -4).text(says);
    strip_.append("g").attr("class", "yaxis");
    strip_.append("path").attr("class", "band");
    strip_.append("path").attr("class", "curve");
  }
  const over = heatmap.append("g").attr("clip-path", "url(#clip)");
  const pruned = over.append("path").attr("class", "pruned"), edge = over.append("path").attr("class", "boundary"), chosen = over.append("g");
  heatmap.append("rect").attr("class", "frame").attr("width", side).attr("height", side);
  const xAxis = heatmap.append("g").attr("class", "axes").attr("transform", `translate(0,${side})`), yAxis = heatmap.append("g").attr("class", "axes");
  heatmap.append("text").attr("class", "axis").attr("x", side / 2).attr("y", side + 58).attr("text-anchor", "middle").text("key (tokens from the start)");
  heatmap.append("text").attr("class", "axis").attr("transform", `translate(${-left + 11},${side / 2}) rotate(-90)`).attr("text-anchor", "middle").text("query");
  const pointer = heatmap.append("rect").attr("class", "pointer").attr("width", side).attr("height", side);
  const painter = squaresPainter(head), ticks = width < 500 ? 4 : 6;

  function redraw() {
    const x = zoom.rescaleX(x0), y = zoom.rescaleY(x0), from = Math.max(0, Math.floor(x.invert(0))), to = Math.min(T, Math.ceil(x.invert(side)));
    painter.paint(canvas, ratio, x, y, side);
    // Close enough, the axes read the text.
    const reads = (axis, scale) => {
      const [first, last] = scale.domain(), words = last - first <= side / 13;
      axis = words ? axis(scale).tickValues(d3.range(Math.ceil(first), Math.min(T, Math.floor(last))).map(i => i + 0.5)).tickFormat(v => readable(text.piece(Math.floor(v))).slice(0, 8)).tickSize(3) : axis(scale).ticks(ticks);
      return [axis, words];
    };
    const [across, words] = reads(d3.axisBottom, x), [down] = reads(d3.axisLeft, y);
    xAxis.call(across).selectAll("text").attr("transform", words ? "rotate(-50) translate(-4,-5)" : null).attr("text-anchor", words ? "end" : "middle");
    yAxis.call(down);
    heatmap.selectAll(".axes .domain").remove();
    const [blockQ] = model.grid, steps = [];
    head.boundary.forEach((_, m) => {
      const key = x(head.firstOfBlocks(m * blockQ));
      steps.push([key, y(m * blockQ)], [key, y(Math.min(T, (m + 1) * blockQ))]);
    });
    edge.attr("d", d3.line()(steps));
    pruned.attr("d", `${d3.line()([[x(0), y(0)], ...steps, [x(0), y(T)]])}Z`);
    drawStrip(gates, i => head.gate(i), [0, 1], from, to, x, strip, side, d3.format(".1~f"));
    drawStrip(sums, i => head.c[i], null, from, to, x, strip, side, null);
    chosen.selectAll("*").remove();
    if (state.token != null) {
      const middle = y(state.token + 0.5), { keys } = head.keysOf(state.token);
      chosen.append("line").attr("class", "query").attr("x1", x(0)).attr("x2", x(state.token + 0.5)).attr("y1", middle).attr("y2", middle);
      chosen.selectAll("circle").data(keys).join("circle").attr("class", "key").attr("cx", k => x(k.key + 0.5)).attr("cy", middle).attr("r", k => 2 + 5 * Math.sqrt(k.weight));
    }
  }
  const zooming = d3.zoom().scaleExtent([1, Math.max(1, T / 24)]).translateExtent([[0, 0], [side, side]]).extent([[0, 0], [side, side]])
    .filter(event => (event.type === "wheel" ? event.ctrlKey || event.metaKey || document.activeElement === place : event.touches ? event.touches.length > 1 : !event.button))
    .on("zoom", ({ transform }) => { zoom = transform; redraw(); });
  pointer.call(zooming).call(zooming.transform, zoom);
  attention.zoomBy = factor => pointer.call(...(factor ? [zooming.scaleBy, factor, state.token == null ? [side / 2, side / 2] : undefined] : [zooming.transform, d3.zoomIdentity]));
  attention.goTo = (i, tokens) => {
    const scale = Math.max(1, T / tokens), at = Math.max(0, x0(i) * scale - side / 2);
    pointer.call(zooming.transform, d3.zoomIdentity.translate(-at, -at).scale(scale));
  };
  const at = event => {
    const [px, py] = d3.pointer(event, pointer.node());
    return [zoom.rescaleX(x0).invert(px), zoom.rescaleY(x0).invert(py)].map(v => Math.max(0, Math.min(T - 1, Math.floor(v))));
  };
  pointer.on("pointermove", event => { $("#readout").textContent = describe(head, ...at(event), painter.near(side)); })
    .on("click", event => change({ token: at(event)[1] }));
  place.onkeydown = event => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }, zooms = { "+": 2, "=": 2, "-": 0.5, "0": 0 };
    if (event.key in moves) pointer.call(zooming.translateBy, ...moves[event.key].map(v => v / zoom.k));
    else if (event.key in zooms) attention.zoomBy(zooms[event.key]);
    else return;
    event.preventDefault();
  };
}

function describe(head, key, query, near) {
  const { cell } = head.model;
  if (key > query) return "Above the diagonal: a query sees no later token.";
  const state_ = key < head.firstOfBlocks(query) ? ", pruned" : "";
  const listed = head.keysOf(query);
  const one = near && listed.query === query && listed.keys.find(k => k.key === key);
  if (one) return `Query ${whole(query)} “${text.piece(query)}” gives ${percent(one.weight)} to key ${whole(key)} “${text.piece(key)}”, ${whole(one.distance)} back${state_}.`;
  const m = Math.floor(query / cell), n = Math.floor(key / cell), end = v => whole(Math.min(head.model.length, (v + 1) * cell) - 1);
  return `Queries ${whole(m * cell)}–${end(m)} give ${percent(head.square(m, n))} to keys ${whole(n * cell)}–${end(n)}${state_}.`;
}

// The attention in squares; closer, single keys on top of them.
function squaresPainter(head) {
  const { cell, length: T } = head.model, N = Math.ceil(T / cell);
  const make = each => {
    const picture = node("canvas", { width: N, height: N }), context = picture.getContext("2d"), image = context.createImageData(N, N);
    for (let m = 0; m < N; m++)
      for (let n = 0; n <= m; n++) {
        const { r, g, b } = d3.rgb(heat(heatScale(Math.max(1e-9, each(head.square(m, n), m, n)))));
        image.data.set([r, g, b, 255], 4 * (m * N + n));
      }
    context.putImageData(image, 0, 0);
    return picture;
  };
  // Under single keys a square shows what is left of it, spread over its keys.
  const rest = () => {
    const listed = new Float64Array(N * N);
    for (let i = 0; i < T; i += head.model.stride)
      for (const { query, key, weight } of head.keysOf(i).keys) listed[Math.floor(query / cell) * N + Math.floor(key / cell)] += weight * head.model.stride / Math.min(cell, T - Math.floor(query / cell) * cell);
    return make((v, m, n) => Math.max(0, v - listed[m * N + n]) / cell);
  };
  let far = null, near = null;
  const isNear = side => cell > 1 && T / zoom.k <= 1.5 * side;
  return {
    near: isNear,
    paint(canvas, ratio, x, y, side) {
      const context = canvas.getContext("2d"), closer = isNear(side);
      const picture = closer ? (near ??= rest()) : (far ??= make(v => v));
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, side, side);
      context.imageSmoothingEnabled = false;
      context.save(); // nothing stands above the diagonal
      context.beginPath();
      for (const [key, query] of [[0, 0], [1, 0], [T, T - 1], [T, T], [0, T]]) context.lineTo(x(key), y(query));
      context.clip();
      context.drawImage(picture, x(0), y(0), x(N * cell) - x(0), y(N * cell) - y(0));
      const first = Math.max(0, Math.floor(y.invert(0))), last = Math.min(T, Math.ceil(y.invert(side)));
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
  const shares = heads.map(head => [...head.byDistance]), y = d3.scaleLinear([0, d3.max(shares.flat())], [height - bottom, 12]).nice(4);
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", heads.map(h => `${headName(h.row)}: half of the weight lies within ${h.row.half_weight_tokens} tokens`).join("; "));
  svg.append("g").attr("class", "axes").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(4).tickFormat(v => `${d3.format(".0~f")(100 * v)} %`)).select(".domain").remove();
  const names = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144].filter(v => v < bins.at(-1));
  svg.append("g").attr("class", "axes").attr("transform", `translate(0,${height - bottom})`)
    .call(d3.axisBottom(x).tickValues(names.map(v => v + 1)).tickFormat(v => d3.format(".3~s")(v - 1).replace(/^(\d+)\.\d*k$/, "$1k")));
  svg.append("text").attr("class", "axis").attr("x", (left + width) / 2).attr("y", height - 4).attr("text-anchor", "middle").text("distance of the key (tokens)");
  shares.forEach((share, which) => {
    const bars = svg.append("g").attr("class", `bars of${which}`);
    if (heads.length > 1) svg.append("path").attr("class", `step of${which}`).attr("d", d3.line()(share.flatMap((v, i) => [[at(i), y(v)], [at(i + 1), y(v)]])));
    bars.selectAll("rect").data(share).join("rect").attr("x", (_, i) => at(i)).attr("width", (_, i) => Math.max(1, at(i + 1) - at(i) - (heads.length > 1 ? 0 : 0.6)))
      .attr("y", y).attr("height", v => y(0) - y(v))
      .on("pointermove", (event, v) => {
        const i = share.indexOf(v);
        showTip(event, `${whole(bins[i])}${bins[i + 1] - 1 > bins[i] ? `–${whole(bins[i + 1] - 1)}` : ""} back: ${percent(v)}`);
      }).on("pointerleave", hideTip);
  });
  if (heads.length === 1) {
    const { row } = heads[0], marks = [[row.half_weight_tokens, "half of the weight"], [row.median_window_tokens - 1, "window"]];
    marks.forEach(([tokens, says], i) => {
      const px = x(Math.min(tokens, bins.at(-1)) + 1), left_ = px > width - 100;
      svg.append("line").attr("class", "mark").attr("x1", px).attr("x2", px).attr("y1", 4 + 13 * i).attr("y2", height - bottom);
      svg.append("text").attr("class", "axis").attr("x", px + (left_ ? -4 : 4)).attr("y", 12 + 13 * i).attr("text-anchor", left_ ? "end" : "start").text(says);
    });
  }
  place.replaceChildren(svg.node());
}
