"use strict";
// Decodes the data that acp_repro/explorer/pack.py wrote. A head is inflated on first use.

const about = JSON.parse(document.getElementById("about").textContent);
const KINDS_OF_ARRAYS = ["u2", "f8", "f8", "i4", "u4", "f4", "u1", "u4", "u1", "u1", "f4", "u1", "i2"];
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

async function inflate(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Splits concatenated arrays that are stored as byte planes, the lowest bytes first.
function split(bytes, kinds, sizes) {
  let at = 0;
  return kinds.map((kind, which) => {
    const type = TYPES[kind], width = type.BYTES_PER_ELEMENT, count = sizes[which];
    const joined = new Uint8Array(count * width);
    for (let byte = 0; byte < width; byte++)
      for (let i = 0; i < count; i++) joined[i * width + byte] = bytes[at++];
    return new type(joined.buffer);
  });
}

class Head {
  constructor(model, row, arrays) {
    [this.gates, this.cStarts, this.cEnds, this.firstKept, this.boundary, this.lost, this.counts, this.distances,
      this.weights, this.cells, this.byDistance, this.receivedBytes, this.logits] = arrays;
    this.model = model;
    this.row = row;
    this.threshold = model.thresholds[row.index];
    this.packed = { firstKept: this.firstKept, boundary: this.boundary, threshold: this.threshold };
    this.logEpsilon = this.ownLogEpsilon = row.log_pruning_tolerance ?? null;
    for (let i = 1; i < this.firstKept.length; i++) this.firstKept[i] += this.firstKept[i - 1];
    this.starts = new Uint32Array(this.counts.length + 1);
    this.counts.forEach((count, i) => { this.starts[i + 1] = this.starts[i] + count; });
    this.c = this.#runningSum();
  }

  logOdds(i) { return (this.gates[i] - 32768) / this.model.gateSteps; }
  gate(i) { return 1 / (1 + Math.exp(-this.logOdds(i))); }
  logGate(i) {
    const x = this.logOdds(i);
    return x > 0 ? -Math.log1p(Math.exp(-x)) : x - Math.log1p(Math.exp(x));
  }

  // Log odds of two gates: the median gate, or 0.999 if the median is larger, and the 1 % quantile.
  usual() {
    if (!this.odds) {
      const odds = Float64Array.from(this.gates, (_, i) => this.logOdds(i)).sort(), least = Math.min(d3.quantileSorted(odds, 0.5), Math.log(999));
      this.odds = [least, Math.min(d3.quantileSorted(odds, 0.01), least - 1)];
    }
    return this.odds;
  }

  // c is exact at the stored positions; between them, the running sum of the gates is rescaled to match.
  #runningSum() {
    const n = this.gates.length, [, step] = this.model.grid, c = new Float64Array(n);
    for (let first = 0; first < n; first += step) {
      const last = Math.min(n, first + step), before = first ? c[first - 1] : 0;
      let sum = before;
      for (let i = first; i < last; i++) c[i] = sum += this.logGate(i);
      const end = this.cEnds[first / step];
      if (end !== undefined && sum < before)
        for (let i = first; i < last; i++) c[i] = before + (c[i] - before) * (end - before) / (sum - before);
    }
    return c;
  }

  // The decay D of a query and a key, in nats; null in a model without gates.
  decay(i, j) { return this.c.length ? this.c[i] - this.c[j] : null; }
  // q.k of a query and a listed key. The file stores q.k of the strongest key; the others follow from the ratio of the
  // weights, because every weight of a query is exp(q.k + D) over the same sum.
  logit(query, k, strongest) {
    if (!this.logits.length || k.weight === 0 || strongest.weight === 0) return null;
    return this.logits[query] / this.model.gateSteps + this.decay(query, strongest.key) - this.decay(query, k.key) + Math.log(k.weight / strongest.weight);
  }

  // Computes the boundary of another epsilon like acp_repro.attention.boundary.find_boundary: a block is pruned if its
  // largest decay is below delta. delta is log epsilon - log L - 2 U, so delta shifts with log epsilon.
  prune(logEpsilon) {
    if (logEpsilon === this.logEpsilon || this.ownLogEpsilon === null) return;
    this.logEpsilon = logEpsilon;
    const own = logEpsilon === this.ownLogEpsilon;
    this.threshold = own ? this.packed.threshold : Math.fround(this.packed.threshold + logEpsilon - this.ownLogEpsilon);
    this.boundary = own ? this.packed.boundary : this.#boundaryAt(this.threshold);
    this.firstKept = own ? this.packed.firstKept : this.#firstKeptAt(this.threshold);
  }
  #boundaryAt(threshold) {
    const [blockQ, blockK] = this.model.grid;
    let column = 0;
    return Uint32Array.from(this.cStarts, (c, m) => {
      const diagonal = Math.floor(m * blockQ / blockK);
      while (column < diagonal && c - this.cEnds[column] < threshold) column++;
      return column;
    });
  }
  // At token level, from the decoded c and therefore up to its rounding.
  #firstKeptAt(threshold) {
    let key = 0;
    return Int32Array.from(this.c, (c, i) => {
      while (key < i && c - this.c[key] < threshold) key++;
      return key;
    });
  }
  // Pruned blocks divided by causal blocks, in this sequence.
  get prunedRatio() {
    const [blockQ, blockK] = this.model.grid, T = this.model.length;
    const causal = d3.sum(this.boundary, (_, m) => Math.floor((Math.min(T, (m + 1) * blockQ) - 1) / blockK) + 1);
    return d3.sum(this.boundary) / causal;
  }
  // The largest mean pruned weight of a row of squares; null if blocks do not consist of whole squares.
  get prunedMass() {
    const { cell, grid: [blockQ, blockK], length: T } = this.model;
    if (blockQ % cell || blockK % cell) return null;
    return d3.max(d3.range(Math.ceil(T / cell)), m => d3.sum(d3.range(this.firstOfBlocks(m * cell) / cell), n => this.square(m, n)));
  }

  // The first key of the first block that this query keeps.
  firstOfBlocks(i) {
    const [blockQ, blockK] = this.model.grid;
    return this.boundary[Math.floor(i / blockQ)] * blockK;
  }
  lostOf(i) { return this.lost[Math.floor(i / this.model.grid[0])]; }

  // The last query up to token i with listed keys, and its strongest keys.
  keysOf(i) {
    const row = Math.floor(i / this.model.stride), query = row * this.model.stride, keys = [];
    for (let at = this.starts[row]; at < this.starts[row + 1]; at++) {
      const key = query - this.distances[at];
      keys.push({ query, key, distance: this.distances[at], weight: this.weightAt(at), decay: this.decay(query, key), kept: key >= this.firstOfBlocks(query) });
    }
    for (const k of keys) k.logit = this.logit(query, k, keys[0]);
    return { query, keys };
  }
  weightAt(at) { return (this.weights[at] / 255) ** 2; }

  // The mean weight of the queries of square m on the keys of square n; 0 below the floor.
  square(m, n) { return logarithmic(this.cells[m * (m + 1) / 2 + n], this.model.cellFloor, 1); }
  received(j) { return logarithmic(this.receivedBytes[j], this.model.receivedFloor, this.model.length); }
}

function logarithmic(byte, least, most) {
  return byte ? least * Math.exp((byte - 1) / 254 * Math.log(most / least)) : 0;
}

// Labels of heads, by rules on the columns of the table. A head may have several labels.
const LABELS = [
  { name: "current token", rule: "at least 50\u00a0% of the weight is on the query’s own token", holds: r => r.half_weight_tokens === 0 },
  { name: "previous token", rule: "at least 30\u00a0% of the weight is on the token before the query", holds: r => r.previous_token_weight >= 0.3 },
  { name: "attention sink", rule: "at least 30\u00a0% of the weight is on the first token of the text", holds: r => r.first_token_weight >= 0.3 },
  { name: "induction", rule: "at least 10\u00a0% of the weight is on tokens that followed an earlier occurrence of the query’s token", holds: r => r.induction_weight >= 0.1 },
];

const models = about.models.map((model, index) => {
  const columns = Object.keys(model.table);
  const rows = model.table.layer.map((_, i) => Object.fromEntries(columns.map(c => [c, model.table[c][i]])));
  rows.forEach((row, i) => {
    row.index = i;
    if (row.token_pruned_ratio !== undefined) row.keep_ratio = 1 - row.token_pruned_ratio;
    row.labels = LABELS.filter(label => label.holds(row)).map(label => label.name).join(", ");
  });
  const inflated = new Map();
  const [at, own] = [model.table.log_pruning_tolerance?.[0], model.ownTolerance].map(v => String(v).replace("-", "−"));
  return {
    ...model, index, rows,
    exact: model.ownTolerance == null,
    pruning: model.ownTolerance == null ? `trained without ACP; the page shows the pruning at log ε ${at}`
      : own === at ? `trained with ACP, log ε ${at}` : `trained with ACP at log ε ${own}; the page shows log ε ${at}`,
    layers: d3.max(rows, r => r.layer) + 1,
    heads: d3.max(rows, r => r.head) + 1,
    read(i) { return inflate(`m${index}h${i}`).then(bytes => new Head(this, rows[i], split(bytes, KINDS_OF_ARRAYS, model.sizes[i]))); },
    head(i) {
      if (!inflated.has(i)) inflated.set(i, this.read(i));
      return inflated.get(i);
    },
  };
});

// The text: the piece of each token.
const text = { pieces: about.pieces, which: null, length: models[0].length };
text.ready = inflate("text").then(bytes => { [text.which] = split(bytes, ["u4"], [text.length]); });
text.piece = i => text.pieces[text.which[i]];
text.range = (first, last) => d3.range(Math.max(0, first), Math.min(text.length, last)).map(text.piece).join("");
