// A conversation as one HTML file, for readers who have no moeflow: its shown path, as the page shows it. The file has no
// scripts and loads nothing. All that people and models wrote becomes text nodes, which the browser itself escapes.

import { highlight } from "../code/highlighter.js";
import { measuredLine } from "../facts.js";
import { mathLoaded } from "../markdown/math.js";
import { MarkdownView } from "../markdown/view.js";
import { describeValues } from "../presets/values.js";
import { language, tr } from "../translate.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
const STYLES = ["../prose.css", "shared.css"];

/** The text of the file. `system` is the conversation's system prompt, its own or that of its preset. */
export async function writeHtml(conversation, system) {
  const main = element("main", "", head(conversation, system), ...conversation.turns().map(turnElement));
  await untilDrawn(main);
  simplify(main);
  return [
    `<!doctype html>\n<html lang="${language()}">\n<head>\n<meta charset="utf-8">`,
    `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">',
    element("title", conversation.name).outerHTML,
    `<style>\n${await styles()}</style>\n</head>\n<body>`,
    `${main.outerHTML}\n</body>\n</html>\n`,
  ].join("\n");
}

function head({ name, model }, system) {
  const date = new Date().toLocaleDateString(language(), { dateStyle: "long" });
  const line = [model, tr("saved on {date}", { date })].filter(Boolean).join(" · ");
  const shown = element("header", "", element("h1", name), element("p", line));
  if (system) shown.append(folded(tr("System prompt"), element("pre", system)));
  return shown;
}

function turnElement({ prompt, answer }) {
  const turn = element("article", "", element("h2", tr("You asked:")));
  turn.append(...prompt.files.map(({ name, text }) => folded(name, element("pre", text))));
  const question = element("p", prompt.content);
  question.className = "prompt";
  question.dir = "auto";
  if (prompt.content) turn.append(question);
  if (answer) turn.append(element("h2", tr("Answer:")), ...answerElements(answer));
  return turn;
}

function answerElements(answer) {
  const { content, reasoning, toolCalls, error } = answer;
  const parts = [];
  if (reasoning) parts.push(folded(tr("Thoughts"), prose(reasoning)));
  parts.push(...toolCalls.map((call) => folded(tr("Called {name}", { name: call.name }), element("pre", call.arguments))));
  parts.push(prose(content));
  if (error) parts.push(element("p", error));
  const numbers = element("p", numbersLine(answer));
  numbers.className = "numbers";
  return [...parts, numbers];
}

function numbersLine(answer) {
  const { asked } = answer;
  return [...(asked ? [asked.model, ...describeValues(asked.values)] : []), measuredLine(answer)].filter(Boolean).join(" · ");
}

function prose(text) {
  const shown = element("div");
  shown.className = "prose";
  new MarkdownView(shown).update(text);
  return shown;
}

/** Wait until code has its colours and formulas are set. */
async function untilDrawn(main) {
  if (main.querySelector(".math")) await mathLoaded();
  if (main.querySelector("figure")) await highlight("", ""); // answered after all that was asked before
}

/** Leave out what only the page can use: buttons, and the look of formulas that needs fonts. */
function simplify(main) {
  for (const button of main.querySelectorAll("button")) button.remove();
  for (const drawn of main.querySelectorAll(".katex")) {
    const formula = drawn.querySelector("math");
    if (formula) drawn.replaceWith(formula);
  }
}

async function styles() {
  const files = STYLES.map(async (name) => (await fetch(new URL(name, import.meta.url))).text());
  return [colours(), ...(await Promise.all(files))].join("\n");
}

/** The first rule of style.css, which names the colours. */
function colours() {
  const sheet = [...document.styleSheets].find(({ href }) => href?.endsWith("/style.css"));
  return sheet.cssRules[0].cssText;
}

function folded(title, content) {
  return element("details", "", element("summary", title), content);
}

function element(tag, text = "", ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}
