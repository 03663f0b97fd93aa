"use strict";
// Shared by all views: the state of the page, number formats, colours, tooltips and export.

const $ = (selector, root = document) => root.querySelector(selector);
const whole = d3.format(",");
const node = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child != null));
  return made;
};

// ---- numbers ----
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const superscript = n => [...String(n)].map(d => SUPERSCRIPT[d]).join("");
function small(x) {
  const [digits, exponent] = x.toExponential(0).split("e-");
  return `${digits}·10⁻${superscript(exponent)}`;
}
function percent(x) {
  if (x == null) return "–";
  if (x > 0 && x < 5e-5) return small(x);
  return `${(100 * x).toFixed(x < 0.00995 ? 2 : 1)}\u00a0%`;
}
const counted = (n, what) => `${whole(n)} ${what}${n === 1 ? "" : "s"}`;
// The file stores the square root of a weight in steps of 1/255, which limits the number of digits.
const roundedBy = weight => Math.sqrt(weight) / 255;
const weightText = w => (w < 0.0995 ? percent(w) : `${Math.round(100 * w)}\u00a0%`);
const gateText = f => (f > 0.9995 && f < 1 ? `1 − ${small(1 - f)}` : f.toFixed(3));
const GATED = models.some(m => m.table.mean_forget_gate); // a model without forget gates has no gate panels
const kindName = kind => kind ?? "–";
// A global head keeps all or nearly all keys, so a count would describe the causal mask and not the head.
const contextText = (v, row) => (row?.kind === "global" ? "all keys" : whole(v));
const nats = v => v.toFixed(1).replace(/^-0\.0$/, "0.0").replace("-", "−");
// The displayed columns: name, unit, description, number format, and whether the scale is logarithmic.
const COLUMNS = Object.fromEntries(Object.entries({
  kind: { name: "kind", says: "local heads prune nearly the achievable maximum, global heads almost nothing", text: kindName, words: true },
  labels: { name: "labels", says: "the main target of the head’s weight; the Glossary lists the rules", text: v => v || "–", words: true },
  pruned_ratio: { name: "pruned ratio", unit: "% of blocks", says: "pruned blocks divided by causal blocks", text: percent, domain: [0, 1] },
  token_pruned_ratio: { name: "token-level pruned ratio", unit: "% of keys", says: "pruned ratio with blocks of one token", text: percent, domain: [0, 1] },
  keep_ratio: { name: "keep ratio", unit: "% of keys", says: "fraction of a query’s past keys that are kept, at token level", text: percent, domain: [0, 1] },
  median_window_tokens: { name: "effective context p50", unit: "tokens", says: "keys that a query keeps: median over the queries", text: contextText, log: true },
  q90_window_tokens: { name: "effective context p90", unit: "tokens", says: "keys that a query keeps: 90th percentile over the queries", text: contextText, log: true },
  mean_forget_gate: { name: "mean forget gate", unit: "0 to 1", says: "mean of f over the tokens; with a gate of 1 the head forgets nothing", text: v => v.toFixed(3), domain: [0, 1] },
  half_weight_tokens: { name: "median attention distance", unit: "tokens", says: "half of the attention weight is within this distance", text: v => whole(v), log: true },
  strongest_weight: { name: "max weight", unit: "% of a query’s weight", says: "weight of a query’s strongest key, mean over the queries", text: percent, domain: [0, 1] },
  first_token_weight: { name: "attention-sink weight", unit: "% of a query’s weight", says: "weight on the first token of the text, mean over the queries", text: percent },
  previous_token_weight: { name: "previous-token weight", unit: "% of a query’s weight", says: "weight on the token before the query, mean over the queries", text: percent },
  induction_weight: { name: "induction weight", unit: "% of a query’s weight", says: "weight on tokens that followed an earlier occurrence of the query’s token", text: percent },
  sink_weight: { name: "learned-sink weight", unit: "% of a query’s weight", says: "weight on a learned sink, which is not a key", text: percent },
  "keys_99": { name: "keys for 99\u00a0%", unit: "keys", says: "keys that receive 99\u00a0% of a query’s weight: median over the queries", text: v => whole(v), log: true },
  entropy_nats: { name: "attention entropy", unit: "nats", says: "mean entropy of a row of weights", text: v => v.toFixed(2) },
  known: { name: "prunable a priori", unit: "% of blocks", says: "fraction of blocks that a bound on the decay prunes before q·k is computed", text: percent, domain: [0, 1] },
  "seen_e-10": { name: "prunable online", unit: "% of blocks", says: "fraction of blocks that the running sum prunes, at ε = e⁻¹⁰", text: percent, domain: [0, 1] },
  "after_e-10": { name: "prunable by an oracle", unit: "% of blocks", says: "fraction of blocks that an oracle prunes, at ε = e⁻¹⁰", text: percent, domain: [0, 1] },
  logit_bound: { name: "logit bound U", unit: "nats", says: "upper bound on |q·k| in the head", text: v => v.toFixed(2) },
  threshold_nats: { name: "threshold δ", unit: "nats", says: "blocks whose largest decay D is below δ are pruned", text: nats },
  largest_pruned_mass: { name: "max pruned mass", unit: "fraction of a query’s weight", says: "the largest weight that a query loses by pruning", text: v => (v ? percent(v) : "0"), log: true, floor: 1e-45 }, // the smallest positive float32
}).filter(([key]) => models.every(m => key === "labels" ? m.rows[0].half_weight_tokens !== undefined : m.rows[0][key] !== undefined)));
const titled = key => `${COLUMNS[key].name}${COLUMNS[key].unit ? ` (${COLUMNS[key].unit})` : ""}`;
const SHADES = ["kind", "median_window_tokens", "pruned_ratio", "mean_forget_gate", "keys_99", "seen_e-10", "first_token_weight"].filter(key => COLUMNS[key]);
const SORTS = Object.keys(COLUMNS), NUMBERS = SORTS.filter(key => !COLUMNS[key].words);

// ---- state, stored in the address so that a reload or a link restores it ----
// The initial head is the intermediate head whose pruned ratio is closest to 80 % of the achievable maximum.
const usual = d3.least(models[0].rows.filter(r => r.kind === "intermediate"), r => Math.abs(r.pruned_ratio - 0.8 * r.largest_pruned_ratio))?.index ?? 0;
const state = { view: "model", model: 0, row: usual, token: null, epsilon: null, rule: null, ruleHead: null, shade: SHADES[0], kinds: new Set(["local", "intermediate", "global", "–"]) };
// The visible part of the matrix, in tokens, which is preserved across heads and page sizes.
const WHOLE = { key: 0, query: 0, tokens: Infinity };
let shownPart = WHOLE;
let readSquare = null; // the key and the query that were clicked last
const listeners = [];
const onChange = listener => listeners.push(listener);
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const within = (key, most, other) => {
    const value = words.has(key) ? Number(words.get(key)) : NaN;
    return Number.isInteger(value) && value >= 0 && value < most ? value : other;
  };
  const view = words.get("view");
  state.view = views.some(v => v.id === view) ? view : "model";
  state.model = within("model", models.length, 0);
  const { rows } = models[state.model];
  const found = rows.findIndex(r => r.layer === Number(words.get("layer")) && r.head === Number(words.get("head")));
  state.row = words.has("layer") && found >= 0 ? found : state.row;
  state.token = within("token", text.length, null);
  const key = within("key", text.length, null), part = (words.get("part") ?? "").split(",").map(Number);
  readSquare = key !== null && state.token !== null ? { key, query: state.token } : null;
  shownPart = part.length === 3 && part.every(v => v >= 0 && v <= text.length) && part[2] ? { key: part[0], query: part[1], tokens: part[2] } : WHOLE;
  const epsilon = Number(words.get("log-epsilon") ?? NaN);
  state.epsilon = epsilon < 0 && epsilon >= -1000 ? epsilon : null;
  state.rule = RULES?.rules.some(r => r.name === words.get("rule")) ? words.get("rule") : null;
  state.ruleHead = within("rule-head", models[0].rows.length, null);
  state.shade = SORTS.includes(words.get("shade")) ? words.get("shade") : SHADES[0];
}
// The parameters of the address for the state, updated by `changes`.
function address(changes = {}) {
  const { view, model, row: index, token, shade, rule, ruleHead } = { ...state, ...changes }, row = models[model].rows[index];
  const words = new URLSearchParams({ view, ...(models.length > 1 && { model }), layer: row.layer, head: row.head });
  if (token != null) words.set("token", token);
  if (token != null && readSquare?.query === token) words.set("key", readSquare.key);
  if (shownPart.tokens < text.length) words.set("part", [shownPart.key, shownPart.query, shownPart.tokens].map(v => Math.max(0, Math.round(v))));
  if (state.epsilon !== null) words.set("log-epsilon", state.epsilon);
  if (rule !== null) words.set("rule", rule);
  if (ruleHead !== null) words.set("rule-head", ruleHead);
  if (shade !== SHADES[0]) words.set("shade", shade);
  return words;
}
// A jump adds an entry to the browser's history, like a change of view.
function change(changes, jump = false) {
  const before = { ...state };
  Object.assign(state, changes);
  // A page inside a notebook has no address of its own.
  try { history[before.view === state.view && !jump ? "replaceState" : "pushState"](null, "", `#${address()}`); } catch { /* the address stays */ }
  listeners.forEach(listener => listener(before));
}
// Browsers reject address updates at every frame of a movement.
let addressing = null;
function writeAddress() {
  clearTimeout(addressing);
  addressing = setTimeout(() => { try { history.replaceState(null, "", `#${address()}`); } catch { /* as above */ } }, 250);
}
const currentRow = () => models[state.model].rows[state.row];
const currentHead = () => models[state.model].head(state.row).then(pruned);
function pruned(head) {
  head.prune(state.epsilon ?? head.ownLogEpsilon);
  return head;
}
const headName = row => `layer ${row.layer}, head ${row.head}`;

// ---- colours ----
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => style("--dark") === "1";
const kindColour = kind => style(`--${kind ? kindName(kind) : "none"}`) || style("--none");
// Attention weights use viridis, as in Figure 6, with the page colour at no weight. The decay uses the blues of Figure 6.
const HEATS = { light: d3.interpolateRgbBasis(["#ffffff", "#e0edb4", "#86d549", "#26ad81", "#2a788e", "#414487", "#440154"]), dark: d3.interpolateRgbBasis(["#171b20", "#45295f", "#414487", "#2a788e", "#26ad81", "#86d549", "#fde725"]) };
const decayColour = t => d3.interpolateBlues(0.12 + 0.63 * t);
const heat = t => HEATS[isDark() ? "dark" : "light"](t);
const sequential = t => (isDark() ? d3.interpolateViridis(0.08 + 0.92 * t) : d3.interpolateYlGnBu(0.06 + 0.86 * t));
// A logarithmic scale has no 0.
const onScale = (column, v) => (column.log ? Math.max(column.floor ?? 1, v) : v);
function shader(key, rowsOfAll) {
  if (key === "kind") return Object.assign(row => kindColour(row.kind), { kinds: true });
  const column = COLUMNS[key], domain = column.domain ?? d3.extent(rowsOfAll, r => r[key]);
  const scale = column.log ? d3.scaleLog([onScale(column, domain[0]), Math.max(2 * onScale(column, 0), domain[1])], [0, 1]).clamp(true) : d3.scaleLinear(domain, [0, 1]);
  return Object.assign(row => sequential(scale(onScale(column, row[key]))), { scale, domain });
}
const inkOn = colour => {
  const { l } = d3.hcl(colour);
  return l > 50 ? "#111" : "#fff"; // where both have the same contrast
};

// ---- the tooltip ----
const tip = $("#tip");
function showTip(event, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(innerWidth - width - 4, event.clientX + 14))}px`;
  tip.style.top = `${event.clientY + height + 22 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
}
const hideTip = () => { tip.hidden = true; };
function tipOfRow(event, row, ...more) {
  const lines = [...SHADES, "half_weight_tokens", "strongest_weight"].filter(key => key !== "kind");
  showTip(event, node("strong", {}, `${headName(row)}: ${[...(GATED ? [kindName(row.kind)] : []), row.labels].filter(Boolean).join(", ")}`),
    node("table", {}, ...lines.map(key => node("tr", {}, node("th", {}, COLUMNS[key].name), node("td", {}, COLUMNS[key].text(row[key], row))))), ...more);
}

// ---- export ----
function download(name, content, type) {
  const link = node("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const csvField = v => (v == null ? "" : /[",\n\r]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : v);
const csv = (names, rows) => [names, ...rows].map(row => row.map(csvField).join(",")).join("\n") + "\n";
const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline", "visibility"];
// A saved image includes the name of the model and head, the caption and the legend.
function captionOf(svg) {
  const figure = svg.closest("figure"), says = $("figcaption p", figure)?.textContent.replace(/\s*Click [^.]*\.?/, "");
  const heading = $("h2", figure).textContent, names = models.map(m => m.name), both = state.view === "compare";
  const whose = both ? names.join(" and ") : state.view === "head" ? `${names[state.model]}, ${headName(currentRow())}` : names[state.model];
  return { title: both && names.includes(heading) ? `${heading}: layers and heads` : `${whose}: ${heading}`, says, legends: [...figure.querySelectorAll(".legend")] };
}
const wordsOf = text => text.split(/[ \n]+/).filter(Boolean);
const GAP = Symbol("gap");
const itemsOf = element => [...element.childNodes].flatMap(child => (child.nodeType === Node.TEXT_NODE ? wordsOf(child.data) : child.hidden ? [] : child.hasChildNodes() ? [GAP, ...itemsOf(child), GAP] : [child]));
const ruler = node("canvas").getContext("2d");
// Lays out words and colour samples in lines of at most `width`; returns the total height.
function flow(group, items, width, { size = 11, weight = 400, fill = style("--quiet") } = {}) {
  const { fontFamily } = getComputedStyle(document.body), high = size + 5;
  ruler.font = `${weight} ${size}px ${fontFamily}`;
  const space = ruler.measureText(" ").width;
  let x = 0, y = 0, run = null; // words in one line are one text
  for (const [i, item] of items.entries()) {
    if (item === GAP) { run = null; x += x && space; continue; }
    const word = typeof item === "string", wide = word ? ruler.measureText(item).width : item.offsetWidth;
    const after = !word && typeof items[i + 1] === "string" ? space + ruler.measureText(items[i + 1]).width : 0; // a sample and its word stay together
    if (x && x + wide + after > width) { x = 0; y += high; run = null; }
    if (!word) { run = null; sample(group, item, x, y + high / 2); }
    else if (run) run.text(`${run.text()} ${item}`);
    else run = group.append("text").attr("x", x).attr("y", y + size).attr("fill", fill).attr("font-size", size).attr("font-weight", weight).attr("font-family", fontFamily).text(item);
    x += wide + space;
  }
  return items.length ? y + high : 0;
}
// Draws the dot, line, square or ramp of a legend.
function sample(group, element, x, middle) {
  const looks = getComputedStyle(element), { offsetWidth: width, offsetHeight: height } = element;
  const colours = looks.backgroundImage.match(/rgba?\([^)]*\)/g), plain = parseFloat(looks.borderTopWidth) ? looks.borderTopColor : looks.backgroundColor;
  if (colours)
    group.append("linearGradient").attr("id", "ramp").selectAll("stop").data(colours).join("stop").attr("offset", (_, i) => i / (colours.length - 1)).attr("stop-color", c => c);
  group.append("rect").attr("x", x).attr("y", middle - height / 2).attr("width", width).attr("height", height).attr("opacity", looks.opacity)
    .attr("rx", looks.borderRadius === "50%" ? height / 2 : 0).attr("fill", colours ? "url(#ramp)" : plain);
}
// A copy of the SVG with inline styles; a canvas behind the SVG becomes an embedded image.
function standalone(svg) {
  const copy = svg.cloneNode(true), originals = [...svg.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((element, i) => {
    const looks = getComputedStyle(originals[i]);
    for (const look of LOOKS) element.style.setProperty(look, looks.getPropertyValue(look));
  });
  const made = d3.select(copy), canvas = svg.parentNode.querySelector("canvas"), edge = 10;
  if (canvas)
    made.insert("image", ":first-child").attr("href", canvas.toDataURL()).attr("style", "image-rendering: pixelated")
      .attr("x", canvas.offsetLeft).attr("y", canvas.offsetTop).attr("width", canvas.offsetWidth).attr("height", canvas.offsetHeight);
  const box = svg.viewBox.baseVal, wide = Math.max(320, box.width), { title, says, legends } = captionOf(svg);
  const above = made.append("g"), below = made.append("g").attr("transform", `translate(0,${box.height + edge})`);
  let top = flow(above, wordsOf(title), wide, { size: 13, weight: 600, fill: style("--ink") }), bottom = 0;
  if (says) top += flow(above.append("g").attr("transform", `translate(0,${top})`), wordsOf(says), wide);
  for (const legend of legends) bottom += flow(below.append("g").attr("transform", `translate(0,${bottom})`), itemsOf(legend), wide);
  above.attr("transform", `translate(0,${-top - edge})`);
  const from = [-edge, -top - 2 * edge], width = wide + 2 * edge, height = box.height + top + bottom + 4 * edge;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  made.attr("width", width).attr("height", height).attr("viewBox", `${from[0]} ${from[1]} ${width} ${height}`);
  made.insert("rect", ":first-child").attr("x", from[0]).attr("y", from[1]).attr("width", width).attr("height", height).attr("fill", style("--paper"));
  return { source: new XMLSerializer().serializeToString(copy), width, height };
}
function savePNG(svg, name) {
  const { source, width, height } = standalone(svg), picture = new Image(), canvas = node("canvas", { width: 2 * width, height: 2 * height });
  picture.onload = () => {
    canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
    canvas.toBlob(blob => download(`${name}.png`, blob));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
}
// Export buttons of a figure. `numbers` returns [names, rows]; `name` returns the file name without extension.
function saveButtons(name, svg, numbers) {
  const button = (what, action) => node("button", { type: "button", class: "save", "aria-label": `Save as ${what}`, onclick: action }, what);
  return node("span", { class: "saves" }, "save ",
    ...(svg ? [button("SVG", () => download(`${name()}.svg`, standalone(svg()).source, "image/svg+xml")), button("PNG", () => savePNG(svg(), name()))] : []),
    ...(numbers ? [button("CSV", () => download(`${name()}.csv`, csv(...numbers()), "text/csv"))] : []));
}
const fileName = (...parts) => parts.join("-").replace(/[^\w.-]+/g, "-");
const rowFile = what => () => fileName(models[state.model].name, `layer${currentRow().layer}`, `head${currentRow().head}`, what);
function figure(title, says, ...content) {
  const made = node("figure", {}, node("figcaption", {}, node("h2", {}, title), says ? node("p", {}, says) : null), ...content);
  nameSaves(made, title);
  return made;
}
// The label of each button names the figure, for screen readers.
function nameSaves(place, title) {
  for (const button of place.querySelectorAll(".save")) button.setAttribute("aria-label", `${button.getAttribute("aria-label")}: ${title}`);
}
