"use strict";
// View of the text for one head: gates as shades, and the strongest keys of a token.

const textView = { id: "text", name: "Text", draw: drawTextView };
const PAGE = 512; // tokens per page
const reading = { first: 0, laid: null, shade: GATED ? "forgets" : "received", query: "", hits: [] };
const clamp = t => Math.max(0, Math.min(1, t));
// Shades: the value of a token from 0 to 1, and the labels of the ends of the scale.
const TEXT_SHADES = {
  ...(GATED && { forgets: { name: "forgetting, 1 − f, if above the median", of: (head, i) => { const [least, most] = head.usual(); return clamp((least - head.logOdds(i)) / (least - most)); }, ends: head => head.usual().map(logit => percent(1 / (1 + Math.exp(logit)))) } }),
  received: { name: "weight received from later tokens", of: (head, i) => clamp(Math.log10(Math.max(head.received(i), 0.1) * 10) / 3), ends: () => ["0.1 queries’ weight", "100 queries’ weight"] },
  none: { name: "nothing", of: () => 0, ends: () => null },
};
// A token that only completes the previous character has no text.
const readable = piece => piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, spaces => "␣".repeat(spaces.length)) || "·";
const oneLine = (first, last) => text.range(first, last).replaceAll("\n", " ");

async function drawTextView(section, before) {
  const wanted = currentRow(), head = await currentHead();
  await text.ready;
  if (state.view !== "text" || wanted !== currentRow()) return;
  const laid = [state.model, state.row, reading.shade].join(), same = before?.view === "text" && reading.laid === laid;
  if (!same) layText(section, head);
  reading.laid = laid;
  const offset = state.token - reading.first, near = state.token == null || (offset < PAGE && offset >= (reading.first ? PAGE / 8 : 0));
  const moves = !near && (before?.view !== "text" || before.token !== state.token);
  if (moves) reading.first = firstFor(state.token);
  if (moves || !same) drawPage(head);
  drawOverview(head);
  markTokens(head);
  showToken(head);
}
// The start of a page that shows more text before the token than after it.
const firstFor = token => Math.max(0, Math.min(text.length - PAGE, token - 3 * PAGE / 4));
// Shows another page; the selected token is kept, and its keys are marked on the new page.
function turnTo(first, head, lookFor = null) {
  reading.first = Math.max(0, Math.min(text.length - PAGE, first));
  drawPage(head);
  drawOverview(head);
  markTokens(head, lookFor);
  // The pressed button may have been removed, or disabled at the end of the text.
  if (document.activeElement === document.body || document.activeElement.disabled) $("#tokens").focus({ preventScroll: true });
}

function layText(section, head) {
  const search = node("input", { type: "search", id: "search", placeholder: "find in the text", "aria-label": "Find in the text", value: reading.query, onkeydown: e => { if (e.key === "Enter") { e.preventDefault(); find(e.target.value, e.shiftKey ? -1 : 1); } } });
  const shade = TEXT_SHADES[reading.shade], ends = shade.ends(head), stops = d3.range(0, 1.01, 0.2).map(tint);
  section.replaceChildren(
    node("div", { class: "controls" },
      node("label", {}, "shade ", node("select", { id: "text-shade", onchange: e => { reading.shade = e.target.value; change({}); } },
        ...Object.entries(TEXT_SHADES).map(([key, s]) => node("option", { value: key, selected: key === reading.shade }, s.name)))),
      ends ? node("span", { class: "legend" }, ends[0], node("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), ends[1]) : null,
      node("span", { class: "search" }, search, node("button", { type: "button", "aria-label": "Previous match", onclick: () => find(search.value, -1) }, "‹"), node("button", { type: "button", "aria-label": "Next match", onclick: () => find(search.value, 1) }, "›"), node("span", { id: "hits", "aria-live": "polite", class: "quiet" }))),
    node("div", { id: "overview", role: "slider", tabindex: 0, "aria-label": "Position in the text", "aria-valuemin": 0, "aria-valuemax": text.length - 1 }),
    node("div", { class: "columns wide-left" },
      node("div", {},
        node("div", { class: "pager" }, node("button", { type: "button", onclick: () => turnTo(reading.first - PAGE, head) }, "← previous"), node("span", { id: "page-of" }), node("button", { type: "button", onclick: () => turnTo(reading.first + PAGE, head) }, "next →")),
        node("div", { id: "nearby" }),
        node("div", { id: "tokens", tabindex: 0, role: "group", "aria-label": "The text: arrow keys move from token to token", onkeydown: moveByKey, onclick: e => { const i = e.target.closest("[data-i]")?.dataset.i; if (i != null) readAt(Number(i)); } })),
      node("div", { class: "side" }, node("div", { id: "token", "aria-live": "polite" }), node("div", { id: "far" }))));
  farLookBacks(head);
}

const tint = t => { const c = d3.color(style("--shade")); c.opacity = style("--most") * t; return c; };
function drawPage(head) {
  const { first } = reading, last = Math.min(text.length, first + PAGE), shade = TEXT_SHADES[reading.shade], spans = [];
  for (let i = first; i < last; i++) {
    const piece = text.piece(i), t = shade.of(head, i);
    spans.push(node("span", { class: piece ? "token" : "token rest", "data-i": i, style: t > 0.01 ? `--t: ${t.toFixed(3)}` : null }, piece.replaceAll("\n", "↵\n") || "·"));
  }
  $("#tokens").replaceChildren(...spans);
  $("#page-of").textContent = `tokens ${whole(first)}–${whole(last - 1)} of ${whole(text.length)}`;
  const [before, after] = document.querySelectorAll(".pager button");
  before.disabled = !first;
  after.disabled = last >= text.length;
}
// The browser's Back undoes a jump, but not a step with the arrow keys.
const goTo = (i, jump = true) => { const token = Math.max(0, Math.min(text.length - 1, i)); change({ token }, jump && token !== state.token); };
// In the one-column layout, also scrolls to the text, which is followed by the token's keys.
function readAt(i) {
  goTo(i);
  if (matchMedia("(max-width: 900px)").matches) $(".pager").scrollIntoView();
}

function moveByKey(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: PAGE, PageUp: -PAGE };
  if (state.token == null && event.key in steps) { // the first key press selects the first token of the page
    event.preventDefault();
    return goTo(reading.first, false);
  }
  let to = event.key in steps ? state.token + steps[event.key] : null;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") to = lineStep(event.key === "ArrowDown" ? 1 : -1);
  if (to == null) return;
  event.preventDefault();
  goTo(to, false);
}
// The token below or above the selected one in the current line layout.
function lineStep(way) {
  const here = $(`[data-i="${state.token}"]`)?.getBoundingClientRect();
  const lines = !here ? [] : [...document.querySelectorAll("#tokens .token")].map(el => [el.getClientRects()[0], Number(el.dataset.i)]).filter(([r]) => r && (r.top - here.top) * way > 4);
  if (!lines.length) return state.token + way * 12;
  const line = (way > 0 ? d3.min : d3.max)(lines, ([r]) => r.top);
  return d3.least(lines.filter(([r]) => Math.abs(r.top - line) < 4), ([r]) => Math.abs(r.left - here.left))[1];
}

// The keys of the selected token; initially no token is selected.
const keysOfToken = head => (state.token == null ? { query: -1, keys: [] } : head.keysOf(state.token));
// Marks the selected token, its keys and its pruned keys in the text, and counts its keys on earlier pages.
function markTokens(head, lookFor = null) {
  const { query, keys } = keysOfToken(head), first = query < 0 ? 0 : head.firstOfBlocks(query), tokens = $("#tokens"), weights = new Map(keys.map(k => [k.key, k.weight]));
  for (const el of tokens.children) {
    const i = Number(el.dataset.i), weight = weights.get(i);
    el.classList.toggle("past", i < first);
    el.classList.toggle("looked", weight !== undefined);
    el.classList.toggle("chosen", i === state.token);
    el.style.setProperty("--weight", weight === undefined ? "" : `${1.5 + 4 * Math.sqrt(weight)}px`);
    if (i === state.token) el.setAttribute("aria-current", "true");
    else el.removeAttribute("aria-current");
  }
  const earlier = keys.map(k => k.key).filter(key => key < reading.first), nearest = d3.max(earlier);
  $("#nearby").replaceChildren(
    ...(earlier.length ? [node("button", { type: "button", onclick: () => turnTo(nearest - PAGE / 2, head, nearest) }, earlier.length < keys.length ? `↑ ${earlier.length} of its ${keys.length} strongest keys ${earlier.length > 1 ? "are" : "is"} before this page` : `↑ ${keys.length > 1 ? `All ${keys.length} strongest keys are` : "The only listed key is"} before this page`)] : [node("span", { class: "quiet" }, state.token == null ? "Click a token, or press →, to see its strongest keys." : "All of its strongest keys are on this page or after it.")]),
    ...(state.token == null || tokens.querySelector(".chosen") ? [] : [node("button", { type: "button", onclick: () => turnTo(firstFor(state.token), head) }, `return to token ${whole(state.token)}`)]));
  const goal = tokens.querySelector(lookFor == null ? ".chosen" : `[data-i="${lookFor}"]`) ?? tokens.firstChild, box = tokens.getBoundingClientRect(), at = goal.getBoundingClientRect();
  if (at.top < box.top || at.bottom > box.bottom) tokens.scrollTop += at.top - box.top - tokens.clientHeight * 0.6;
  $("#hits").textContent = hitsText();
}

// Token i with its neighbours. Overflow is clipped at the outer ends, so the token remains visible.
const inContext = i => node("span", { class: "context" }, node("span", {}, oneLine(i - 8, i)), node("mark", {}, readable(text.piece(i))), node("span", {}, oneLine(i + 1, i + 9)));

// The panel beside the text: statistics of the selected token and the list of its keys.
function showToken(head) {
  const i = state.token;
  if (i == null)
    return $("#token").replaceChildren(node("h2", {}, "No token selected"), node("p", {}, "Click a token of the text to see its gate, its pruned keys and its strongest keys. The list below shows the queries with the longest attention distances."));
  const { query, keys } = head.keysOf(i), first = head.firstOfBlocks(query), listed = d3.sum(keys, k => k.weight), lost = head.lostOf(query), received = d3.format(".2~f")(head.received(i));
  $("#token").replaceChildren(
    node("h2", {}, `Token ${whole(i)} `, node("code", {}, readable(text.piece(i)))),
    node("p", {}, `${GATED ? `gate ${gateText(head.gate(i))} · c ${head.c[i].toFixed(2).replace("-", "−")} · ` : ""}receives ${received} times the weight of one query${text.piece(i) ? "" : " · continues the previous character"}`),
    node("p", {}, first ? `Keys 0–${whole(first - 1)} (grey in the text, ${percent(first / (query + 1))} of the past) ${head.model.exact ? "would be" : "are"} pruned. ${head.logEpsilon !== head.ownLogEpsilon ? `The pruning tolerance is log ε = ${nats(head.logEpsilon)}. ` : `Their pruned mass is ${lost ? `at most ${percent(lost)}` : "0 in float32"}. `}` : "ACP prunes no key of this token. ",
      `Token-level pruning would keep ${counted(query + 1 - head.firstKept[query], "key")}.`),
    node("h3", {}, query === i ? "Strongest keys" : `Strongest keys of token ${whole(query)} (one in ${head.model.stride} tokens has a list)`),
    node("ol", { class: "keys" }, ...keys.map(k => node("li", {}, node("button", { type: "button", onclick: () => readAt(k.key), "aria-label": `Key ${k.key}, ${readable(text.piece(k.key))}, weight ${weightText(k.weight)}` },
      node("span", { class: "bar", style: `width: ${100 * k.weight}%` }), node("span", { class: "weight" }, weightText(k.weight)),
      inContext(k.key),
      node("span", { class: "quiet" }, k.distance ? `${whole(k.distance)} back` : "itself", k.kept ? "" : ", pruned"))))),
    ...(head.logits.length ? [node("h3", {}, "Scores"), splitTable(head, keys)] : []),
    node("p", { class: "quiet" }, `${keys.length > 1 ? `These ${keys.length} keys receive` : "This key receives"} ${percent(Math.min(1, listed))} of the weight. The list has at most 8 keys, with ${d3.format("~f")(100 * head.model.leastWeight)}\u00a0% or more each.`),
    saveButtons(() => fileName(rowFile("token")(), i), null, () => [["query", "key", "token", "distance", "weight", "rounded_by_up_to", "pruned", "qk_nats", "decay_nats"], keys.map(k => [k.query, k.key, text.piece(k.key), k.distance, k.weight.toFixed(4), roundedBy(k.weight).toFixed(4), !k.kept, k.logit?.toFixed(2), k.decay?.toFixed(2)])]));
  nameSaves($("#token"), `keys of token ${i}`);
}

// A strip of the full text; each column is the mean of its tokens, and a click selects a position.
function drawOverview(head) {
  const place = $("#overview"), width = Math.max(280, place.clientWidth), height = 40, columns = Math.min(width, text.length), shade = TEXT_SHADES[reading.shade];
  const ratio = Math.min(2, devicePixelRatio || 1), canvas = node("canvas", { width: width * ratio, height: height * ratio, style: `width: ${width}px; height: ${height}px`, "aria-hidden": "true" }), context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const x = i => i / text.length * width;
  for (let p = 0; p < columns; p++) {
    const tokens = d3.range(Math.floor(p * text.length / columns), Math.floor((p + 1) * text.length / columns));
    context.fillStyle = tint(d3.mean(tokens, i => shade.of(head, i)));
    context.fillRect(p * width / columns, 0, width / columns + 0.5, height);
  }
  context.fillStyle = style("--accent");
  for (const hit of reading.hits) context.fillRect(x(hit) - 1, 0, 2, 10);
  const { keys, query } = keysOfToken(head);
  context.fillStyle = style("--pruned-ink");
  if (query >= 0) context.fillRect(0, height - 4, x(head.firstOfBlocks(query)), 4);
  context.fillStyle = style("--ink");
  for (const { key, weight } of keys) context.fillRect(x(key) - 1, height * (1 - Math.sqrt(weight)), 2, height);
  context.strokeStyle = style("--ink");
  context.strokeRect(x(reading.first) + 0.5, 0.5, Math.max(3, x(PAGE)) - 1, height - 1);
  place.replaceChildren(canvas);
  place.setAttribute("aria-valuenow", state.token ?? reading.first);
  place.setAttribute("aria-valuetext", `token ${state.token ?? reading.first} of ${text.length}`);
  place.onclick = event => goTo(Math.floor((event.clientX - place.getBoundingClientRect().left) / width * text.length));
  place.onkeydown = event => {
    const here = state.token ?? reading.first, to = { ArrowRight: here + PAGE, ArrowLeft: here - PAGE, Home: 0, End: text.length - 1 }[event.key];
    if (to != null) { event.preventDefault(); goTo(to, false); }
  };
}

function find(words, way) {
  if (words !== reading.query) {
    reading.query = words;
    reading.hits = [];
    if (words) {
      const offsets = new Uint32Array(text.length);
      let all = "";
      for (let i = 0; i < text.length; i++) { offsets[i] = all.length; all += text.piece(i).toLowerCase(); }
      for (let at = all.indexOf(words.toLowerCase()); at >= 0 && reading.hits.length < 10_000; at = all.indexOf(words.toLowerCase(), at + 1)) reading.hits.push(d3.bisectRight(offsets, at) - 1);
    }
  }
  const { hits } = reading, here = state.token ?? -1, next = way > 0 ? hits.findIndex(i => i > here) : hits.findLastIndex(i => i < here);
  const which = next >= 0 ? next : way > 0 ? 0 : hits.length - 1;
  if (hits.length) goTo(hits[which]);
  else change({});
}
function hitsText() {
  const { query, hits } = reading, which = hits.indexOf(state.token);
  return !query ? "" : !hits.length ? "no match" : which >= 0 ? `${whole(which + 1)} of ${whole(hits.length)}` : `matches: ${whole(hits.length)}`;
}

// The most distant keys with at least 5 % of a query's weight, each with the query of the largest weight.
function farLookBacks(head) {
  const best = new Map();
  for (let row = 0; row < head.counts.length; row++)
    for (let at = head.starts[row]; at < head.starts[row + 1]; at++) {
      const weight = head.weightAt(at), query = row * head.model.stride, key = query - head.distances[at];
      if (weight >= 0.05 && key > 0 && head.distances[at] > 1 && !(best.get(key)?.weight >= weight)) best.set(key, { query, key, weight, distance: head.distances[at] });
    }
  const far = d3.sort([...best.values()], (a, b) => b.distance - a.distance).slice(0, 40);
  $("#far").replaceChildren(node("h3", {}, "Longest attention distances"), node("p", { class: "quiet" }, "Distant keys that receive at least 5\u00a0% of a query’s weight. The first line shows the query, the second line its key. Each key is listed once, with the query that gives it the largest weight. The first token of the text is excluded."), far.length
    ? node("ol", { class: "far", tabindex: 0 }, ...far.map(f => node("li", {}, node("button", { type: "button", onclick: () => readAt(f.query), "aria-label": `Token ${f.query}, ${readable(text.piece(f.query))}, gives ${weightText(f.weight)} to ${readable(text.piece(f.key))}, ${f.distance} back` },
      node("span", { class: "weight" }, `${whole(f.distance)} back`), inContext(f.query), node("span", { class: "weight quiet" }, `${weightText(f.weight)} →`), inContext(f.key)))))
    : node("p", { class: "quiet" }, "No key at a distance of more than one token receives 5\u00a0% of a query’s weight."));
}
