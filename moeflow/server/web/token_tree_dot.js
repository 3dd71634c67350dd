// Token trees as a graph in DOT, the same as `moeflow generate --token-trees` writes (text/token_tree_dot.py).

const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥" }; // so that they are seen
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u;

/** A token's text with signs for what cannot be seen. */
export function visible(token) {
  return [...token].map((char) => SIGNS[char] ?? (HIDDEN.test(char) ? code(char) : char)).join("");
}

function code(char) {
  return `\\u{${char.codePointAt(0).toString(16)}}`;
}

/** One graph, left to right; drafted tokens show their speculator and probability. */
export function toDot(name, passes) {
  const lines = [
    "digraph token_trees {",
    "  rankdir=LR;",
    '  node [shape=box, style=rounded, fontname="monospace"];',
    '  edge [color="#85928e"];',
    `  a0 [label=${quoted(name)}, shape=plaintext];`,
  ];
  let last = "a0";
  passes.forEach((pass, at) => {
    const [drawn, end] = passLines(`a0p${at + 1}`, at + 1, pass, last);
    lines.push(...drawn);
    last = end;
  });
  return [...lines, "}", ""].join("\n");
}

function passLines(prefix, place, pass, before) {
  const kept = ' [color="#0b6b63", penwidth=2]';
  const lines = [];
  const edges = [];
  let last = before;
  if (pass.num_drafted) {
    const label = `pass ${place}: ${pass.num_accepted} of ${pass.num_drafted} kept`;
    lines.push(`  subgraph cluster_${prefix} {`, `    label="${label}"; color="#dde3e1"; fontsize=10;`);
  }
  pass.drafted.forEach((token, node) => {
    const name = `${prefix}n${node}`;
    const who = `${token.speculators.join("+")} ${percent(token.chance)}`;
    const look = token.is_accepted
      ? 'style="rounded,filled", fillcolor="#cfe9e5", color="#0b6b63"'
      : 'style="rounded,dashed", color="#85928e", fontcolor="#56625e"';
    lines.push(`    ${name} [label=${quoted(visible(token.token), who)}, ${look}];`);
    const parent = token.parent === null ? before : `${prefix}n${token.parent}`;
    edges.push(`  ${parent} -> ${name}${token.is_accepted ? kept : ""};`);
    if (token.is_accepted) last = name;
  });
  pass.tokens.slice(pass.drafted.length ? pass.num_accepted : 0).forEach((token, number) => {
    const name = `${prefix}t${number}`;
    lines.push(`    ${name} [label=${quoted(visible(token.token))}, color="#0b6b63", penwidth=2];`);
    edges.push(`  ${last} -> ${name}${kept};`);
    last = name;
  });
  if (pass.num_drafted) lines.push("  }");
  return [[...lines, ...edges], last];
}

/** 0.125 -> "13%" */
export function percent(chance) {
  return `${Math.round(100 * chance)}%`;
}

function quoted(...lines) {
  return `"${lines.map((line) => line.replaceAll("\\", "\\\\").replaceAll('"', '\\"')).join("\\n")}"`;
}
