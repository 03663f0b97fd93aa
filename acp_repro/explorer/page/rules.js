"use strict";
// View of sparse-attention rules: the blocks that each rule skips in each head and the loss, from head_map.json.

const rulesView = { id: "rules", name: "Rules", draw: drawRules };
const RULES = models[0].rules; // null without --rules
const shareText = v => `${(100 * v).toFixed(1)}\u00a0%`;
const lossText = v => (v ? percent(v) : "0");
const RULE_COLUMNS = {
  skipped: { name: "skipped", unit: "% of visible blocks", says: "blocks that the rule skips; rows of blocks, or pairs of tokens, for rules that decide per query or per key", text: shareText, domain: [0, 1] },
  worst_row_loss: { name: "worst-row loss", unit: "fraction of a row’s weight", says: "the largest exact weight of a row on skipped blocks", text: lossText, log: true, floor: 1e-9 },
  mean_row_loss: { name: "mean-row loss", unit: "fraction of a row’s weight", says: "exact weight on skipped blocks, mean over the rows", text: lossText },
  output_error: { name: "largest output error", unit: "fraction of max |v|", says: "largest error of a row’s output after renormalisation", text: lossText },
  certified_skipped: { name: "certified at equal loss", unit: "% of visible blocks", says: "blocks that the certified test skips at the worst-row loss of the rule", text: shareText, domain: [0, 1] },
};
const RULE_NAME = { rule: { name: "rule", words: true, says: "rule with its settings" } };
const RULE_SIZE = {
  at_once: { name: "granularity", unit: "queries × keys", words: true, says: "size in tokens of the query block and the key block of one decision" },
};
const ruleSorting = { key: "index", down: false };

// One row per rule over all heads, per head for one rule, or per rule for one head.
function ruleRows() {
  const about = new Map(RULES.rules.map((r, index) => [r.name, { index, rule: r.name, certified: r.certified, source: r.source, at_once: `${r.query_tokens} × ${r.key_tokens}` }]));
  if (state.rule === null && state.ruleHead === null) return RULES.rules.map(r => ({ ...r, ...about.get(r.name) }));
  return RULES.heads.flatMap((h, index) => Object.entries(h.rules)
    .filter(([name]) => (state.rule ?? name) === name && (state.ruleHead ?? index) === index)
    .map(([name, numbers]) => ({ ...about.get(name), ...(state.ruleHead === null && { index }), of: models[0].rows[index], ...numbers })));
}

function drawRules(section) {
  const rows = ruleRows(), byHead = state.ruleHead === null && state.rule !== null, { rows: heads } = models[0];
  const best = d3.greatest(RULES.rules.filter(r => r.certified && !r.name.startsWith("oracle")), r => r.skipped), most = d3.greatest(RULES.rules, r => r.worst_row_loss);
  const name = row => (byHead ? `${row.of.layer}.${row.of.head}` : row.rule), pick = row => change(byHead ? { rule: null, ruleHead: row.of.index } : { rule: row.rule, ruleHead: null });
  const colour = row => (byHead ? kindColour(row.of.kind) : style(row.certified ? "--acp" : "--quiet"));
  const choice = (says, id, options, chosen, choose) => node("label", {}, `${says} `, node("select", { id, onchange: e => choose(e.target.value === "" ? null : e.target.value) }, ...options.map(([value, text]) => node("option", { value, selected: String(chosen ?? "") === String(value) }, text))));
  const dot = (background, says) => node("span", {}, node("span", { class: "dot", style: `background: ${background}` }), says);
  const title = byHead ? `Heads under ${state.rule}` : state.ruleHead === null ? "Rules over all heads" : `Rules in ${headName(heads[state.ruleHead])}`;
  const columns = { ...(byHead ? { head: { name: "head", unit: "layer.head", says: "layer and head" }, ...(GATED && { kind: COLUMNS.kind }) } : RULE_NAME), ...RULE_COLUMNS, ...(!byHead && RULE_SIZE) };
  section.replaceChildren(
    node("p", { class: "lead" }, `This view shows the blocks that ${RULES.rules.length} rules of sparse attention would skip on the first ${whole(RULES.tokens)} tokens. All weights are exact, because no rule is applied while the model runs. Among the rules with a bound on every row, “${best.name}” skips the most blocks: ${shareText(best.skipped)}, with a worst-row loss of ${lossText(best.worst_row_loss)}. The largest loss of a row is ${lossText(most.worst_row_loss)}, under “${most.name}”.`),
    node("div", { class: "controls" },
      choice("heads", "rule-head", [["", "all heads"], ...heads.map(r => [r.index, headName(r)])], state.ruleHead, index => change({ ruleHead: index === null ? null : Number(index) })),
      choice("rule", "rule-name", [["", "all rules"], ...RULES.rules.map(r => [r.name, r.name])], state.rule, rule => change({ rule })),
      state.ruleHead === null ? null : node("button", { type: "button", onclick: () => openHead(heads[state.ruleHead], 0) }, "open this head")),
    figure("Skipped blocks against worst-row loss", `${title}. Higher points skip more; points further left lose less. A ring marks the certified test at the same loss.`, node("div", { id: "rule-plot" }),
      node("p", { class: "legend" }, ...(byHead ? (GATED ? ["local", "intermediate", "global"].map(kind => dot(kindColour(kind), kindName(kind))) : []) : [dot(style("--acp"), "with a bound on every row"), dot(style("--quiet"), "without a bound")]), node("span", {}, node("span", { class: "ring" }), "certified test at equal loss")),
      saveButtons(() => fileName(models[0].name, "rules"), () => $("#rule-plot svg"))),
    figure(title, `${state.rule === null && state.ruleHead === null ? "Worst-row loss and output error are maxima over heads; the other columns are means. " : ""}Click a column to sort by it, and a row to see ${byHead ? "all rules in that head" : "that rule in each head"}.`,
      sortableTable("rules", rows, columns, ruleSorting, (row, key) => {
        if (key === "head") return name(row);
        if (key === "kind") return [node("span", { class: "dot", style: `background: ${kindColour(row.of.kind)}` }), kindName(row.of.kind)];
        return key === "rule" ? [node("span", { class: "dot", style: `background: ${colour(row)}` }), node("span", { title: row.source }, row.rule)] : key === "at_once" ? row.at_once : RULE_COLUMNS[key].text(row[key]);
      }, row => ({ onclick: () => pick(row) }), (row, key) => (key === "head" ? row.index : key === "kind" ? row.of.kind ?? "" : row[key])),
      saveButtons(() => fileName(models[0].name, "rules"), null, () => [["layer", "head", "rule", ...Object.keys(RULE_COLUMNS)], rows.map(r => [r.of?.layer, r.of?.head, r.rule, ...Object.keys(RULE_COLUMNS).map(k => r[k])])])),
    figure("Rules that cannot be computed", null, node("ul", {}, ...RULES.not_computable.map(r => node("li", {}, node("strong", {}, r.name), `: ${r.reason}.`)))));
  const across = { ...RULE_COLUMNS.worst_row_loss, unit: "fraction; left edge: ≤ 10⁻⁹" };
  const tell = (event, row) => showTip(event, node("strong", {}, byHead ? headName(row.of) : row.rule), node("table", {}, ...Object.entries(RULE_COLUMNS).map(([key, column]) => node("tr", {}, node("th", {}, column.name), node("td", {}, column.text(row[key]))))));
  scatterPlot($("#rule-plot"), rows, ["worst_row_loss", across], ["skipped", RULE_COLUMNS.skipped], { says: `${title}: skipped blocks and worst-row loss; the table below lists the same numbers`, shade: colour, name, pick, tell, widest: 1240, other: "certified_skipped" });
}
