// Facts of counts: how many tokens each expert of a layer computed. A row of counts is one layer, [num_experts].

const add = (one, other) => one + other;

export const sum = (row) => row.reduce(add, 0);

/** The sum over all layers and experts. */
export const sumAll = (rows) => rows.reduce((total, row) => total + sum(row), 0);

/** How many tokens each expert got relative to even routing, where every expert of the layer gets as many. */
export function relativeToEven(row) {
  const even = sum(row) / row.length;
  return row.map((tokens) => (even ? tokens / even : 0));
}

/** The counts of several requests, added; [] if there are none. */
export function addCounts(all) {
  return all.reduce((total, counts) => (total.length ? total.map((row, i) => row.map((n, j) => n + counts[i][j])) : counts), []);
}

/** What the counts of a layer tell. `effective` is two to the power of the entropy: so many experts, used evenly, would
 *  have the same entropy. */
export function layerFacts(row) {
  const total = sum(row);
  const shares = row.map((tokens) => (total ? tokens / total : 0));
  const entropyBits = -shares.filter(Boolean).reduce((bits, share) => bits + share * Math.log2(share), 0);
  const most = Math.max(...row);
  return {
    total,
    entropyBits: entropyBits || 0, // not -0
    effective: total ? 2 ** entropyBits : 0,
    busiest: row.indexOf(most),
    busiestTokens: most,
    numIdle: row.filter((tokens) => tokens === 0).length,
  };
}

/** The value that a share of all values does not exceed. */
export function quantile(values, share) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
}
