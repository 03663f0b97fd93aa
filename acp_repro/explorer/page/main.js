"use strict";
// Tabs, the selected head, keyboard shortcuts and colour themes: the frame of all views.

const views = [modelView, headView, textView, ...(RULES ? [rulesView] : []), ...(models.length > 1 ? [compareView] : [])];

function drawTabs() {
  const tabs = $("#tabs"), focused = tabs.contains(document.activeElement);
  tabs.replaceChildren(...views.map(view => node("button", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": `view-${view.id}`, "aria-selected": String(state.view === view.id), tabindex: state.view === view.id ? 0 : -1, onclick: () => change({ view: view.id }) }, view.name)));
  if (focused) $(`#tab-${state.view}`).focus();
}
$("#tabs").addEventListener("keydown", event => {
  const here = views.findIndex(v => v.id === state.view), last = views.length - 1;
  const to = { ArrowRight: here < last ? here + 1 : 0, ArrowLeft: here ? here - 1 : last, Home: 0, End: last }[event.key];
  if (to == null) return;
  event.preventDefault();
  event.stopPropagation();
  change({ view: views[to].id });
});

function drawChosen() {
  const place = $("#chosen"), row = currentRow(), { rows } = models[state.model];
  place.hidden = !["head", "text"].includes(state.view);
  if (place.hidden) return place.replaceChildren();
  place.replaceChildren(
    modelChoice() ?? "",
    node("button", { type: "button", id: "previous", "aria-label": "Previous head", disabled: !state.row, onclick: () => step(-1) }, "‹"),
    node("select", { id: "which", "aria-label": "Head", onchange: e => change({ row: Number(e.target.value) }) }, ...rows.map(r => node("option", { value: r.index, selected: r.index === state.row }, headName(r)))),
    node("button", { type: "button", id: "next", "aria-label": "Next head", disabled: state.row === rows.length - 1, onclick: () => step(1) }, "›"),
    ...(GATED ? [node("span", { class: "badge" }, node("span", { class: "dot", style: `background: ${kindColour(row.kind)}` }), row.kind ? `${kindName(row.kind)} head` : "nothing to prune")] : []),
    ...(row.labels ? [node("span", { class: "badge", title: LABELS.filter(l => l.holds(row)).map(l => l.rule).join("; ") }, row.labels)] : []));
}
const step = way => change({ row: Math.max(0, Math.min(models[state.model].rows.length - 1, state.row + way)) });

// Drawing recreates elements, so the focus moves to the new element with the same id, or with the same index inside
// an element with the same id. If there is none, the view gets the focus.
const FOCUSABLE = "a[href], button, select, input, [tabindex]";
function placeOf(element) {
  const around = element.closest("[id]");
  return element !== document.body && around && { id: around.id, at: element.id ? -1 : [...around.querySelectorAll(FOCUSABLE)].indexOf(element) };
}
function putFocus({ id, at }, section) {
  const now = document.activeElement;
  if (now !== document.body && now.getClientRects().length && !now.disabled) return;
  const around = document.getElementById(id), found = at < 0 ? around : around?.querySelectorAll(FOCUSABLE)[at];
  (found?.getClientRects().length && !found.disabled ? found : section).focus({ preventScroll: true });
}

function draw(before) {
  const focus = placeOf(document.activeElement);
  hideTip();
  drawTabs();
  drawChosen();
  const model = models[state.model];
  $("#facts").textContent = $("#facts-below").textContent = [...(models.length > 1 ? [model.name] : []), ...(GATED ? [model.pruning] : []), ...model.facts].join(" · ");
  for (const view of views) {
    const section = $(`#view-${view.id}`);
    section.hidden = view.id !== state.view;
    if (view.id !== state.view) { section.replaceChildren(); continue; }
    // A view that was left before it was ready does not report; the current view does.
    Promise.resolve(view.draw(section, before)).then(() => {
      if (view.id !== state.view) return;
      if (focus) putFocus(focus, section);
      if (document.body.dataset.drawn !== view.id) scrollTo(0, 0);
      document.body.dataset.drawn = view.id;
    });
  }
}

const explain = () => $("#glossary").showModal();

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || $("#glossary").open) return;
  if (event.key === "[") step(-1);
  else if (event.key === "]") step(1);
  else if (event.key === "?") explain();
  // Arrow keys step through the text, and + - 0 zoom the matrix, even if no element of the view has the focus.
  else if (state.view === "text" && ["ArrowLeft", "ArrowRight"].includes(event.key) && !event.defaultPrevented) moveByKey(event);
  else if (state.view === "head" && "+=-0".includes(event.key) && !event.defaultPrevented) attention.zoomBy({ "+": 2, "=": 2, "-": 0.5, "0": 0 }[event.key]);
  else if (views[event.key - 1] && !$("#attention")?.contains(event.target)) change({ view: views[event.key - 1].id });
});

// The colour theme: the system's or the selected one.
const THEMES = { "": "◐ auto", light: "○ light", dark: "● dark" };
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("#theme").textContent = THEMES[name];
  $("#theme").setAttribute("aria-label", `Colour theme: ${name || "system"}`);
}
$("#theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3];
  try { localStorage.setItem("acp-heads-theme", next); } catch { /* a browser may forbid storage; a reload then resets the theme */ }
  setTheme(next);
  draw();
});
try { setTheme(Object.keys(THEMES).find(name => name === localStorage.getItem("acp-heads-theme")) ?? ""); } catch { /* as above */ }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
$(".skip").addEventListener("click", event => { event.preventDefault(); $(`#view-${state.view}`).focus(); });
$("#words").addEventListener("click", explain);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
addEventListener("popstate", () => { const before = { ...state }; readAddress(); draw(before); });

for (const label of LABELS) $("#label-rules").append(node("li", {}, node("strong", {}, label.name), `: ${label.rule}.`));

onChange(draw);
readAddress();
draw();
