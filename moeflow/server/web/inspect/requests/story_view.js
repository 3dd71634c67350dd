// The story of one request: why it took as long as it did, phase by phase and pass by pass.

import { listFacts, NONE } from "../../facts.js";
import { saveText } from "../../save_file.js";
import { setText } from "../../set_text.js";
import { TokenTreesView } from "../../token_trees.js";
import { formatNumber, formatPercent, tr } from "../../translate.js";
import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { clock, kindOf, seconds, speed, stateName } from "./format.js";
import { PassesChart } from "./passes_chart.js";
import { phasesElement } from "./phases.js";
import { TouchedExperts } from "./touched_experts.js";

export class StoryView {
  /** `onBack()` is called to leave it; `context` is that of the inspector. */
  constructor(onBack, { copy, open }) {
    this.story = null;
    this.back = make("button", { type: "button", className: "secondary story-back", textContent: tr("All requests") });
    this.back.addEventListener("click", onBack);
    this.title = make("h3", { tabIndex: -1 });
    this.missing = make("p", { className: "hint" });
    this.reasons = make("ul", { className: "story-reasons" });
    this.phases = make("div");
    this.facts = make("dl", { className: "facts" });
    this.note = make("p", { className: "hint" });
    this.passes = new PassesChart();
    this.experts = new TouchedExperts(() => open("experts", { request: this.story.id }));
    const drafts = document.getElementById("turn-template").content.querySelector(".drafts").cloneNode(true);
    this.trees = new TokenTreesView(drafts, copy);
    this.parts = {
      passes: section(tr("Passes"), this.passes.element),
      experts: section(tr("Experts"), this.experts.element),
      drafts: section(tr("Drafts"), drafts),
    };
    const limits = make("button", { type: "button", className: "link", textContent: tr("What limits the speed now") });
    limits.addEventListener("click", () => open("speed"));
    this.why = make("div", {}, section(tr("What took longest"), this.reasons, limits), section(tr("Where the time went"), this.phases));
    this.all = make("div", {}, this.why, this.note, ...Object.values(this.parts), section(tr("Numbers"), this.facts), this.json(copy));
    this.element = make("article", { className: "story" }, this.back, this.title, this.missing, this.all);
  }

  json(copy) {
    const copyButton = make("button", { type: "button", className: "link", textContent: tr("Copy JSON") });
    const saveButton = make("button", { type: "button", className: "link", textContent: tr("Save JSON") });
    const text = () => `${JSON.stringify(this.story, null, 1)}\n`;
    copyButton.addEventListener("click", () => copy(text(), copyButton));
    saveButton.addEventListener("click", () => saveText(`${this.story.object_id || this.story.id}.json`, "application/json", text()));
    return make("p", { className: "story-json" }, copyButton, saveButton);
  }

  /** Show that a request is looked for. */
  begin(id) {
    this.story = null;
    setText(this.title, tr("Request {id}", { id }));
    setText(this.missing, "");
    this.all.hidden = true;
  }

  /** Say why there is no story. */
  fail(text) {
    setText(this.missing, text);
    this.all.hidden = true;
  }

  show(story) {
    this.story = story;
    this.all.hidden = false;
    setText(this.title, `${kindOf(story)}: ${stateName(story.state)}`);
    this.reasons.replaceChildren(...story.slow_because.map(({ template: title, values }) => make("li", { textContent: tr(title, unbroken(values)) })));
    this.why.hidden = story.state === "refused"; // it took no time that tells anything
    this.phases.replaceChildren(phasesElement(story));
    listFacts(this.facts, factsOf(story));
    setText(this.note, missingOf(story));
    this.parts.passes.hidden = !story.passes?.length;
    if (story.passes?.length) this.passes.show(story.passes);
    this.parts.experts.hidden = !story.experts;
    if (story.experts) this.experts.show(story.experts);
    this.parts.drafts.hidden = !story.token_trees?.length;
    this.trees.update(story.token_trees ?? []);
  }

  hide() {
    this.passes.hide();
  }
}

/** What the engine did not observe, if anything; the server has the texts of both, see stories/. */
function missingOf({ not_observed: title }) {
  return title && tr("Passes and experts are not known: {reason}", { reason: tr(title) });
}

/** Values of a sentence, with no line end between a number and its unit. */
const unbroken = (values) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, value.replace(" ", "\u00a0")]));

function section(title, ...content) {
  return make("section", {}, make("h4", { textContent: title }), ...content);
}

function factsOf(story) {
  if (story.state === "refused") return refusalFacts(story);
  const cached = story.prompt_tokens ? story.cached_tokens / story.prompt_tokens : 0;
  const hasDrafts = story.drafted_tokens && !story.token_trees; // else they have a section of their own
  const drafted = hasDrafts ? [[tr("Drafts right"), tr("{accepted} of {drafted}", { accepted: formatNumber(story.accepted_tokens), drafted: formatNumber(story.drafted_tokens) })]] : [];
  const gap = story.slowest_gap_s === null ? NONE : tr("{time}, after token {number}", { time: seconds(story.slowest_gap_s), number: formatNumber(story.slowest_gap_at) });
  return [
    ...(story.error ? [[tr("Error"), story.error]] : []),
    [tr("Came at"), clock(story.started_at)],
    [tr("Prompt"), tr("{count} tokens, {cached} of them cached ({share})", { count: formatNumber(story.prompt_tokens), cached: formatNumber(story.cached_tokens), share: formatPercent(cached) })],
    [tr("Answer"), tr("{count} tokens", { count: formatNumber(story.completion_tokens) })],
    ...(story.sequences > 1 ? [[tr("Sequences"), formatNumber(story.sequences)]] : []),
    [tr("First token after"), story.first_token_s === null ? NONE : seconds(story.first_token_s)],
    [tr("Tokens/s"), story.tokens_per_s === null ? NONE : speed(story.tokens_per_s)],
    [tr("Slowest gap between tokens"), gap],
    ...drafted,
    [tr("Sequences ahead of it"), formatNumber(story.sequences_ahead)],
    ...(!story.read_bytes ? [] : [[tr("Read from disk"), formatBytes(story.read_bytes)]]),
    ...(!story.stall_s ? [] : [[tr("Waited for experts"), seconds(story.stall_s)]]),
    ...(story.host ? [[tr("Machine"), story.host]] : []),
    [tr("Model"), story.model],
    ...(story.key ? [[tr("API key"), story.key]] : []),
    [tr("End"), story.end || NONE],
    [tr("Request id"), story.id],
    [tr("Answer’s id"), story.object_id],
  ];
}

function refusalFacts(story) {
  return [
    [tr("Error"), story.error],
    [tr("HTTP status"), story.status === null ? NONE : String(story.status)],
    [tr("Came at"), clock(story.started_at)],
    ...(story.key ? [[tr("API key"), story.key]] : []),
    [tr("End"), story.end],
    [tr("Request id"), story.id],
  ];
}
