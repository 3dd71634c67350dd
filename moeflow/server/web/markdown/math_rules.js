// Finds formulas: $…$ and \(…\) in a line, $$…$$ and \[…\] by themselves, as models write them.
// A dollar before an amount is not a delimiter: the formula must touch both dollars, and no digit may follow.

const DISPLAY = [
  ["$$", "$$"],
  ["\\[", "\\]"],
];
const INLINE = [["\\(", "\\)"]];

export function addMath(parser) {
  parser.block.ruler.before("fence", "math_block", mathBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.inline.ruler.before("escape", "math_inline", mathInline);
}

/** A formula that has lines to itself. It ends at the first empty line, closed or not, as it does in TeX. */
function mathBlock(state, startLine, endLine, isSilent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false; // indented: code
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const fences = DISPLAY.find(([open]) => state.src.startsWith(open, start));
  if (!fences) return false;
  const [open, close] = fences;
  let tex = "";
  let line = startLine;
  for (; line < endLine; line += 1) {
    const isFirst = line === startLine;
    if (!isFirst && (state.isEmpty(line) || state.sCount[line] < state.blkIndent)) return false;
    const from = isFirst ? start + open.length : state.bMarks[line] + state.tShift[line];
    const text = state.src.slice(from, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end >= 0 && text.slice(end + close.length).trim()) return false; // text follows it
    tex += `${end >= 0 ? text.slice(0, end) : text}\n`;
    if (end >= 0) break;
  }
  const isClosed = line < endLine;
  if (!isClosed && !(state.env.isUnfinished && endLine === state.lineMax)) return false;
  if (isSilent) return true;
  state.line = isClosed ? line + 1 : line;
  const token = state.push("math_block", "", 0);
  token.content = tex.trim();
  token.meta = { isPending: !isClosed };
  token.map = [startLine, state.line];
  return true;
}

function mathInline(state, isSilent) {
  const found = delimited(state) ?? betweenDollars(state);
  if (!found) return false;
  if (!isSilent) {
    const token = state.push("math_inline", "", 0);
    token.content = found.tex.trim();
    token.meta = { isDisplay: found.isDisplay };
  }
  state.pos = found.end;
  return true;
}

function delimited({ src, pos, posMax }) {
  const pair = [...DISPLAY, ...INLINE].find(([open]) => src.startsWith(open, pos));
  if (!pair) return null;
  const [open, close] = pair;
  const end = src.indexOf(close, pos + open.length);
  if (end < 0 || end + close.length > posMax) return null;
  const tex = src.slice(pos + open.length, end);
  return tex.trim() ? { tex, end: end + close.length, isDisplay: pair !== INLINE[0] } : null;
}

function betweenDollars({ src, pos, posMax }) {
  if (src[pos] !== "$" || src[pos + 1] === "$" || /[\p{L}\p{N}\\]/u.test(src[pos - 1] ?? "")) return null;
  for (let end = pos + 1; end < posMax; end += 1) {
    if (src[end] === "\\") end += 1; // what follows is escaped
    else if (src[end] === "`") return null; // code is code
    else if (src[end] === "$") {
      const tex = src.slice(pos + 1, end);
      if (!tex || /^\s|\s$/.test(tex) || /\d/.test(src[end + 1] ?? "")) return null;
      return { tex, end: end + 1, isDisplay: false };
    }
  }
  return null;
}
