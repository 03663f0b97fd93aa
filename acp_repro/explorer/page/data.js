"use strict";
// What acp_repro/explorer/pack.py wrote, read back. Heads are inflated when they are first looked at.

const about = JSON.parse(document.getElementById("about").textContent);
const KINDS_OF_ARRAYS = ["u2", "f4", "i4", "u4", "f4", "u1", "u4", "u1", "u1", "f4", "u1"];
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };

async function inflate(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Arrays whose bytes lie one after the other, the lowest byte of every number first.
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
    [this.gates, this.cEnds, this.firstKept, this.boundary, this.lost, this.counts, this.distances,
      this.weights, this.cells, this.byDistance, this.receivedBytes] = arrays;
    this.model = model;
    this.row = row;
    for (let i = 1; i < this.firstKept.length; i++) this.firstKept[i] += this.firstKept[i - 1];
    this.starts = new Uint32Array(this.counts.length + 1);
    this.counts.forEach((count, i) => { this.starts[i + 1] = this.starts[i] + count; });
    this.c = this.#runningSum();
  }

  logit(i) { return (this.gates[i] - 32768) / this.model.gateSteps; }
  gate(i) { return 1 / (1 + Math.exp(-this.logit(i))); }
  logGate(i) {
    const x = this.logit(i);
    return x > 0 ? -Math.log1p(Math.exp(-x)) : x - Math.log1p(Math.exp(x));
  }

  // Log odds of two gates: of the median token, where a head forgets 0.1 % or more, and of the 1 % that forget most.
  usual() {
    if (!this.odds) {
      const odds = Float64Array.from(this.gates, (_, i) => this.logit(i)).sort(), least = Math.min(d3.quantileSorted(odds, 0.5), Math.log(999));
      this.odds = [least, Math.min(d3.quantileSorted(odds, 0.01), least - 1)];
    }
    return this.odds;
  }

  // Exact where it is written; between, the gates' own sum, stretched to meet it.
  #runningSum() {
    const n = this.gates.length, step = this.model.cTokens, c = new Float64Array(n);
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

  // The first key of the blocks that this query keeps.
  firstOfBlocks(i) {
    const [blockQ, blockK] = this.model.grid;
    return this.boundary[Math.floor(i / blockQ)] * blockK;
  }
  lostOf(i) { return this.lost[Math.floor(i / this.model.grid[0])]; }

  // The query at or before token i whose keys are listed, and its strongest keys.
  keysOf(i) {
    const row = Math.floor(i / this.model.stride), query = row * this.model.stride, keys = [];
    for (let at = this.starts[row]; at < this.starts[row + 1]; at++) {
      const key = query - this.distances[at];
      keys.push({ query, key, distance: this.distances[at], weight: this.weightAt(at), kept: key >= this.firstOfBlocks(query) });
    }
    return { query, keys };
  }
  weightAt(at) { return (this.weights[at] / 255) ** 2; }

  // The weight that the queries of square m give to the keys of square n; 0 where it is under the floor.
  square(m, n) { return logarithmic(this.cells[m * (m + 1) / 2 + n], this.model.cellFloor, 1); }
  received(j) { return logarithmic(this.receivedBytes[j], this.model.receivedFloor, this.model.length); }
}

function logarithmic(byte, least, most) {
  return byte ? least * Math.exp((byte - 1) / 254 * Math.log(most / least)) : 0;
}

const models = about.models.map((model, index) => {
  const columns = Object.keys(model.table);
  const rows = model.table.layer.map((_, i) => Object.fromEntries(columns.map(c => [c, model.table[c][i]])));
  rows.forEach((row, i) => { row.index = i; });
  const inflated = new Map();
  const [at, own] = [model.table.log_pruning_tolerance?.[0], model.ownTolerance].map(v => String(v).replace("-", "−"));
  return {
    ...model, index, rows,
    exact: model.ownTolerance == null,
    pruning: model.ownTolerance == null ? `trained without ACP; shown is what log ε ${at} would prune`
      : own === at ? `trained with ACP, log ε ${at}` : `trained with ACP at log ε ${own}; shown is log ε ${at}`,
    layers: d3.max(rows, r => r.layer) + 1,
    heads: d3.max(rows, r => r.head) + 1,
    head(i) {
      if (!inflated.has(i))
        inflated.set(i, inflate(`m${index}h${i}`).then(
          bytes => new Head(this, rows[i], split(bytes, KINDS_OF_ARRAYS, model.sizes[i]))));
      return inflated.get(i);
    },
  };
});

// The text: which piece each token is.
const text = { pieces: about.pieces, which: null, length: models[0].length };
text.ready = inflate("text").then(bytes => { [text.which] = split(bytes, ["u4"], [text.length]); });
text.piece = i => text.pieces[text.which[i]];
text.range = (first, last) => d3.range(Math.max(0, first), Math.min(text.length, last)).map(text.piece).join("");
