"use strict";
// Tabs, the chosen head, keys, colours: what holds the views together.

const views = [modelView, headView, textView, ...(models.length > 1 ? [compareView] : [])];

function drawTabs() {
  const tabs = $("#tabs"), focused = tabs.contains(document.activeElement);
  tabs.replaceChildren(...views.map(view => node("button", { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": `view-${view.id}`, "aria-selected": String(state.view === view.id), tabindex: state.view === view.id ? 0 : -1, onclick: () => change({ view: view.id }) }, view.name)));
  if (focused) $(`#tab-${state.view}`).focus();
}
$("#tabs").addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.stopPropagation();
  change({ view: views[(views.findIndex(v => v.id === state.view) + step + views.length) % views.length].id });
});

function drawChosen() {
  const place = $("#chosen"), row = currentRow(), { rows } = models[state.model], focused = document.activeElement?.id;
  place.hidden = !["head", "text"].includes(state.view);
  place.replaceChildren(
    modelChoice() ?? "",
    node("button", { type: "button", id: "previous", "aria-label": "Head before", disabled: !state.row, onclick: () => step(-1) }, "‹"),
    node("select", { id: "which", "aria-label": "Head", onchange: e => change({ row: Number(e.target.value) }) }, ...rows.map(r => node("option", { value: r.index, selected: r.index === state.row }, headName(r)))),
    node("button", { type: "button", id: "next", "aria-label": "Next head", disabled: state.row === rows.length - 1, onclick: () => step(1) }, "›"),
    node("span", { class: "badge" }, node("span", { class: "dot", style: `background: ${kindColour(row.kind)}` }), row.kind ?? "nothing to prune"),
    ...["median_window_tokens", "pruned_ratio", "mean_forget_gate"].map(key => node("span", { class: "badge" }, `${COLUMNS[key].name} ${COLUMNS[key].text(row[key])}`)));
  if (focused && place.contains($(`#${focused}`))) $(`#${focused}`).focus();
}
const step = way => change({ row: Math.max(0, Math.min(models[state.model].rows.length - 1, state.row + way)) });

function draw(before) {
  hideTip();
  drawTabs();
  drawChosen();
  const model = models[state.model];
  $("#facts").textContent = [...(models.length > 1 ? [model.name] : []), ...model.facts].join(" · ");
  for (const view of views) {
    const section = $(`#view-${view.id}`);
    section.hidden = view.id !== state.view;
    if (view.id !== state.view) continue;
    // A view left before it was ready says nothing: the one that is shown now has said it.
    Promise.resolve(view.draw(section, before)).then(() => { if (view.id === state.view) document.body.dataset.drawn = view.id; });
  }
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || $("#glossary").open) return;
  if (event.key === "[") step(-1);
  else if (event.key === "]") step(1);
  else if (event.key === "?") $("#glossary").showModal();
  else if (views[event.key - 1] && !$("#attention")?.contains(event.target)) change({ view: views[event.key - 1].id });
});

// Colours: as the system, or what is chosen here.
const THEMES = { "": "◐ auto", light: "○ light", dark: "● dark" };
$("#theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  $("#theme").textContent = THEMES[next];
  $("#theme").setAttribute("aria-label", `Colours: ${next || "as the system"}`);
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
$(".skip").addEventListener("click", event => { event.preventDefault(); $(`#view-${state.view}`).focus(); });
$("#words").addEventListener("click", () => $("#glossary").showModal());
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
addEventListener("popstate", () => { readAddress(); draw(); });

onChange(draw);
readAddress();
draw();
