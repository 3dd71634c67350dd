// Counts how much of the context the next request takes: the system prompt, the earlier turns, the message in the box.
// While an answer is written, it counts for that, and for the answer. All counts are the server's; see context.js.

import { askJson } from "../api.js";
import { answerRoom, countTokens, fitContext } from "./context.js";
import { promptText, requestMessages } from "./messages.js";

const PAUSE_MS = 300; // after the last key
const REST = 4; // times as long as the last count took
const LIVE_MS = 250; // between numbers of a running answer: nobody reads faster, and drawing takes time
const EMPTY = { role: "user", content: "" }; // chat templates want a question at the end

export class ContextMeter {
  /** `view` shows what is counted; `draft()` gives the message in the box, `facts()` those of the model to ask, or nothing
   *  where it is not loaded. */
  constructor(view, { chat, apiKey, draft, facts, isOneOfSeveral }) {
    Object.assign(this, { view, chat, apiKey, draft, facts, isOneOfSeveral });
    this.counted = new Map(); // tokens by what was counted: of the parts that stay while a message is written
    this.key = ""; // of what is shown, or about to be
    this.timer = null;
    this.restMs = 0;
    this.drawnAtMs = 0;
    this.shown = null; // the parts; null where they are not known
  }

  /** Count, if something is another; soon, or at once where only the running answer has grown. */
  update() {
    const subject = this.subject();
    const key = JSON.stringify(subject);
    if (key === this.key) {
      this.draw();
      return;
    }
    this.key = key;
    clearTimeout(this.timer);
    this.controller?.abort();
    this.view.letSend(null); // the message may be shorter now
    if (!subject) this.show(null);
    else this.timer = setTimeout(() => this.count(subject), PAUSE_MS + this.restMs);
  }

  /** What is to be counted: messages by part, and the limits; null where nothing can be. */
  subject() {
    const { chat } = this;
    const model = this.facts();
    if (!model) return null;
    const running = chat.runningAnswers[0];
    const prompt = running ? chat.turns.find((turn) => turn.prompt.id === running.parent)?.prompt : this.draft();
    if (!prompt) return null;
    const { system, max_tokens: maxTokens } = chat.settings.valuesOf(chat.conversation);
    const messages = requestMessages(chat.turns, prompt, system);
    const numSystem = messages[0].role === "system" ? 1 : 0;
    return {
      model: model.name,
      limit: model.max_model_len,
      maxTokens: maxTokens ?? undefined,
      system: messages.slice(0, numSystem),
      turns: messages.slice(numSystem, -1),
      message: promptText(prompt),
    };
  }

  async count(subject) {
    this.controller = new AbortController();
    const { signal } = this.controller;
    const start = performance.now();
    try {
      if (this.isOneOfSeveral() && !(await this.isLoaded(subject.model, signal))) this.show(null);
      else this.show(await this.parts(subject, signal));
    } catch (error) {
      if (error.name !== "AbortError") this.show(null); // the status line tells of problems
    }
    this.restMs = REST * (performance.now() - start);
  }

  /** Whether a model is in memory: to count with it would load it. */
  async isLoaded(name, signal) {
    const { data } = await askJson("v1/models", { apiKey: this.apiKey(), signal });
    return data.some(({ id, status }) => id === name && status === "ready");
  }

  async parts({ model, limit, maxTokens, system, turns, message }, signal) {
    const options = { fields: { model }, apiKey: this.apiKey(), signal };
    const base = await this.once([...system, EMPTY], options);
    const before = await this.once([...system, ...turns, EMPTY], options);
    const whole = [...system, ...turns, { role: "user", content: message }];
    const used = message ? await countTokens(whole, options) : before;
    const room = limit - answerRoom(limit, maxTokens);
    const isFull = used > room;
    const numLeftOut = isFull ? (await fitContext(whole, { tokenLimit: limit, maxTokens, ...options })).numLeftOut : 0;
    const alone = base + used - before; // without the earlier turns, as they can be left out
    return { limit, room, used, alone, system: base, turns: before - base, message: used - before, numLeftOut, hasTurns: turns.length > 0 };
  }

  /** The number of tokens of messages that were counted before, or are likely to be again. */
  async once(messages, options) {
    const key = JSON.stringify([options.fields, messages]);
    if (!this.counted.has(key)) {
      const count = await countTokens(messages, options);
      if (this.counted.size > 2) this.counted.clear();
      this.counted.set(key, count);
    }
    return this.counted.get(key);
  }

  show(parts) {
    this.shown = parts;
    this.view.letSend(parts);
    this.draw();
  }

  /** The running answer has grown. */
  follow() {
    if (performance.now() - this.drawnAtMs >= LIVE_MS) this.draw();
  }

  draw() {
    this.drawnAtMs = performance.now();
    const answers = this.chat.runningAnswers;
    const tokens = answers.map(({ measured }) => measured?.tokens ?? 0);
    this.view.show(this.shown, answers.length ? Math.max(...tokens) : null);
  }
}
