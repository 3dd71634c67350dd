// The figures of the plan beside the measured figures.

import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { tr } from "../../translate.js";
import { table, tableBody, tableRow } from "./table.js";
import { digits, seconds, signedPercent } from "./units.js";

export class Comparison {
  constructor() {
    const columns = [tr("Figure"), ...LABELS.map((label) => label())];
    this.body = tableBody();
    const box = make(
      "div",
      { className: "speed-box", tabIndex: 0, role: "region", "aria-label": tr("The plan beside the measurement") },
      table("speed-table is-stacked", columns, this.body),
    );
    this.element = make("div", {}, box, make("p", { className: "hint", textContent: tr("Expected: what the plan's cost model predicts for what was measured. Comparison: the measurement beside that.") }));
  }

  /** `rows` is `predicted` of /stats/speed. */
  show(rows) {
    const elements = rows.map(row);
    const texts = elements.map(({ textContent }) => textContent).join("\n");
    if (texts === this.shown) return; // marked text stays marked
    this.shown = texts;
    this.body.replaceChildren(...elements);
  }
}

const CLOSE = 0.1; // relative
const LABELS = [() => tr("Plan"), () => tr("Measured"), () => tr("Expected for that"), () => tr("Comparison")];
const NAMES = {
  alone_tokens_per_s: () => tr("Tokens/s, one request"),
  full_tokens_per_s: () => tr("Tokens/s, several requests"),
  first_token_s: () => tr("First token, one request"),
  memory_bytes: () => tr("Memory"),
};

function row({ figure, planned, measured, expected, error_percent: error, unknown }) {
  const cells = [
    planned ? cell(value(figure, planned.value), plannedFor(figure, planned)) : cell("–"),
    measured ? cell(value(figure, measured.value), measuredFor(figure, measured)) : cell("–", reason(unknown)),
    expected === null ? cell("–", measured ? reason(unknown) : "") : cell(value(figure, expected)),
    cell(error === null ? "–" : comparisonText(figure, measured.value, expected)),
  ];
  cells.forEach((it, i) => (it.dataset.label = LABELS[i]())); // for narrow windows, where rows are stacked
  return tableRow(NAMES[figure](), cells);
}

function cell(text, note = "") {
  return make("td", { role: "cell" }, make("span", { className: "speed-value", textContent: text }), ...(note ? [make("span", { className: "speed-note", textContent: note })] : []));
}

/** How a measurement lies to what was expected of it: within a few percent, or so many times as much. */
function comparisonText(figure, measured, expected) {
  const ratio = measured / expected;
  if (Math.abs(ratio - 1) < CLOSE) return tr("as expected ({deviation})", { deviation: signedPercent(100 * (ratio - 1)) });
  const values = { factor: digits(ratio, 2) };
  if (figure === "first_token_s") return tr("{factor} times as long as expected", values);
  if (figure === "memory_bytes") return tr("{factor} times as much as expected", values);
  return tr("{factor} times as fast as expected", values);
}

function value(figure, number) {
  if (figure === "memory_bytes") return formatBytes(number);
  return figure === "first_token_s" ? seconds(number) : digits(number);
}

/** What a figure of the plan holds for. */
function plannedFor(figure, planned) {
  const range = { low: value(figure, planned.low), high: value(figure, planned.high) };
  const load = { count: digits(planned.num_sequences), prompt: digits(planned.prompt_len), answer: digits(planned.gen_len) };
  const between = tr("{low} to {high}", range);
  if (figure === "first_token_s") return `${between}; ${tr("prompt of {prompt} tokens", load)}`;
  if (figure === "alone_tokens_per_s") return `${between}; ${tr("prompt of {prompt}, answer of {answer} tokens", load)}`;
  return `${between}; ${tr("{count} requests at once", load)}`;
}

function measuredFor(figure, measured) {
  const values = { count: digits(measured.num_sequences), tokens: digits(measured.num_tokens), passes: digits(measured.num_passes) };
  if (figure === "first_token_s") return tr("{tokens} tokens computed", values);
  if (figure === "memory_bytes") return tr("{tokens} tokens kept", values);
  if (figure === "alone_tokens_per_s") return tr("{tokens} tokens of context, {passes} passes", values);
  return tr("{count} requests at {tokens} tokens, {passes} passes", values);
}

/** A reason of the server, in the language of the page where it is a usual one. */
const reason = (text) => (text ? tr(text) : "");
