// The tokens of an answer with their probabilities, in a form that is small and the same in every JSON:
//   pieces   The texts of all tokens, each once. A byte outside UTF-8 is U+DC80 to U+DCFF, half a surrogate pair.
//   rows     For each token "place:surprise,place:surprise,…;": the written one, then its likely alternatives. A place
//            is an index of `pieces`, a surprise is -1000 ln p. Both are in base 36.
//   isPart   The answer has other tokens too, which came while nothing was kept.

const BASE = 36;
const SCALE = 1000;
const ROWS = /^(?:[0-9a-z]+:[0-9a-z]+(?:,[0-9a-z]+:[0-9a-z]+)*;)*$/;
const FIRST_BYTE = 0xdc00; // what is added to a byte that stands by itself
const FIRST_HALF = /[\udc80-\udcff]/;
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();
const places = new WeakMap(); // of pieces, by their list

/** Add tokens as the API tells them, `logprobs.content`, to a record. Return it; without one, a new one. */
export function addTokens(record, entries, { isPart = false } = {}) {
  const { pieces, rows } = (record ??= { isPart, pieces: [], rows: "" });
  const added = entries.map((entry) => {
    const alternatives = entry.top_logprobs.filter((it) => !isSame(it, entry));
    return `${[entry, ...alternatives].map((it) => numbers(pieces, it)).join(",")};`;
  });
  record.rows = rows + added.join("");
  return record;
}

function isSame(one, other) {
  return one.token === other.token && String(one.bytes) === String(other.bytes);
}

function numbers(pieces, { token, bytes, logprob }) {
  const surprise = Math.max(0, Math.round(-SCALE * logprob));
  return `${placeOf(pieces, bytes ? pieceOf(bytes) : token).toString(BASE)}:${surprise.toString(BASE)}`;
}

function placeOf(pieces, piece) {
  if (!places.has(pieces)) places.set(pieces, new Map(pieces.map((it, i) => [it, i])));
  const known = places.get(pieces);
  if (!known.has(piece)) {
    known.set(piece, pieces.length);
    pieces.push(piece);
  }
  return known.get(piece);
}

function pieceOf(bytes) {
  try {
    return strict.decode(new Uint8Array(bytes));
  } catch {
    return bytes.map((byte) => String.fromCharCode(byte < 0x80 ? byte : FIRST_BYTE + byte)).join("");
  }
}

/** Reads the tokens of a record as they come. */
export class TokenReader {
  constructor(record) {
    this.record = record;
    this.offset = 0; // in its rows
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.isSplit = false; // a character has begun, and is not whole yet
  }

  /** New tokens { piece, text, chance, others }: `text` has the characters that end in the token, so that the texts of
   *  all tokens are the whole text; `others` are { piece, chance }, the likeliest first. */
  read() {
    const end = this.record.rows.length;
    const rows = this.record.rows.slice(this.offset, end).split(";").slice(0, -1);
    this.offset = end;
    return rows.map((row) => {
      const [token, ...others] = row.split(",").map((pair) => this.choice(pair));
      return { ...token, text: this.textOf(token.piece), others: others.sort((a, b) => b.chance - a.chance) };
    });
  }

  choice(pair) {
    const [place, surprise] = pair.split(":").map((digits) => Number.parseInt(digits, BASE));
    return { piece: this.record.pieces[place] ?? "", chance: Math.exp(-surprise / SCALE) };
  }

  textOf(piece) {
    if (!this.isSplit && !FIRST_HALF.test(piece)) return piece;
    const text = this.decoder.decode(bytesOf(piece), { stream: true });
    this.isSplit = FIRST_HALF.test(piece);
    return text;
  }
}

function bytesOf(piece) {
  return new Uint8Array([...piece].flatMap((char) => (FIRST_HALF.test(char) ? [char.charCodeAt(0) - FIRST_BYTE] : [...encoder.encode(char)])));
}

/** A token's text for readers: bytes that are no character by themselves in hexadecimal. */
export function shownPiece(piece) {
  return [...piece].map((char) => (FIRST_HALF.test(char) ? `\\x${(char.charCodeAt(0) - FIRST_BYTE).toString(16)}` : char)).join("");
}

/** A record from a file, which may come from anywhere; null where it is none. */
export function checkedTokens(record) {
  const { isPart, pieces, rows } = record ?? {};
  const isRecord = Array.isArray(pieces) && pieces.every((it) => typeof it === "string") && typeof rows === "string" && ROWS.test(rows);
  return isRecord ? { isPart: isPart === true, pieces, rows } : null;
}
