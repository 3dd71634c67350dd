// The conversation at work: asks for answers, one at a time, and shows every turn as it stands.
// Emits "change" for anything new, "saved" once stored, "end" after an answer (its message in `detail`), "refuse" with
// a notice for the user, and "announce" with a text for screen readers.

import { Conversation } from "../conversations/conversation.js";
import { fillAnswer } from "./answer.js";
import { fitContext } from "./context.js";
import { begunMessage } from "./continuation.js";
import { explain } from "./explain.js";
import { requestMessages } from "./messages.js";
import { keepingBottom, toBottom } from "./scroll.js";
import { smoothly } from "./smoothly.js";
import { TurnView } from "./turn_view.js";

const SAVE_MS = 5000; // how often a running answer is saved

export class Chat extends EventTarget {
  /** `log` is the element that holds the turns; `apiKey()` gives the key to send, `model()` the name to ask for;
   *  `onCopy(text, button)` copies, `onWhy(requestId)` shows where the time of a request went. */
  constructor({ log, server, settings, store, apiKey, model, onCopy, onWhy }) {
    super();
    Object.assign(this, { log, server, settings, store, apiKey, model });
    this.conversation = new Conversation();
    this.running = null; // AbortController of the answer being written
    this.views = [];
    this.actions = {
      onCopy,
      onWhy,
      onRetry: (turn) => this.answer(turn.prompt),
      onEdit: (turn, content) => this.edit(turn.prompt, content),
      onContinue: (turn) => this.continue(turn),
      onStop: () => this.stop(),
      onChoose: (message) => this.choose(message),
      announce: (text) => this.announce(text),
    };
  }

  get turns() {
    return this.conversation.turns();
  }

  /** What a running answer without text waits for. */
  get waitingFor() {
    return this.server.isLoaded ? "Waiting for the first token…" : "Waiting for the model to load…";
  }

  /** The last answer that has numbers. */
  get lastMeasured() {
    return this.views.findLast((view) => view.answer?.measured)?.answer;
  }

  submit(content, files = []) {
    if (!this.isFree()) return false;
    const prompt = this.conversation.addPrompt(content, files);
    return this.answer(prompt);
  }

  /** Request an answer to a prompt; an earlier answer stays as another version. Returns whether that began. */
  answer(prompt) {
    if (!this.isFree()) return false;
    this.begin(prompt, this.conversation.addAnswer(prompt));
    return true;
  }

  /** Have the model write on at an answer that ended too early. */
  continue({ prompt, answer }) {
    if (!this.isFree()) return;
    Object.assign(answer, { state: "running", cutOff: false, error: null });
    this.begin(prompt, answer);
  }

  begin(prompt, answer) {
    this.conversation.updatedAt = Date.now();
    this.showTurns();
    this.save();
    this.ask(prompt, answer);
  }

  /** Ask something else in the place of a prompt, which stays as another version. */
  edit(prompt, content) {
    return this.isFree() && this.answer(this.conversation.addPrompt(content, prompt.files, prompt.parent));
  }

  choose(message) {
    if (!this.isFree()) return;
    this.conversation.choose(message);
    this.showTurns();
    this.save();
  }

  /** Whether no answer is being written; if one is, show a notice. */
  isFree() {
    if (this.running) {
      const reason = "An answer is being written: stop it first, or wait for its end.";
      this.dispatchEvent(new CustomEvent("refuse", { detail: reason }));
    }
    return !this.running;
  }

  /** Have the conversation go on with another model. A running answer is still that of the model before. */
  goOnWith(model) {
    if (this.conversation.useModel(model)) this.save();
  }

  stop() {
    this.running?.abort();
  }

  /** Show another conversation. */
  open(conversation) {
    this.stop();
    this.running = null; // it ends by itself, and the next may begin at once
    this.conversation = conversation;
    this.views = [];
    this.log.replaceChildren();
    this.showTurns();
    toBottom();
  }

  /** The page is about to go: end the running answer and keep what came. */
  leave() {
    this.stop();
    this.store.saveLeaving(this.conversation);
  }

  async ask(prompt, answer) {
    const controller = new AbortController();
    const { conversation } = this;
    const { signal } = controller;
    this.running = controller;
    this.show(answer);
    toBottom();
    const saving = setInterval(() => this.save(conversation), SAVE_MS);
    try {
      await this.server.untilLoaded(signal);
      this.show(answer);
      const body = await this.request(prompt, answer, signal);
      await fillAnswer(answer, body, { apiKey: this.apiKey(), signal, onChange: smoothly(() => this.show(answer)) });
      answer.state = "done";
      this.announce("Answer complete.");
    } catch (error) {
      this.endEarly(answer, error);
    } finally {
      clearInterval(saving);
      if (this.running === controller) this.running = null;
      this.save(conversation);
      this.show(answer);
      this.server.poll();
      this.dispatchEvent(new CustomEvent("end", { detail: answer }));
    }
  }

  /** The body of the request for an answer, or for the rest of an answer that has begun. */
  async request(prompt, answer, signal) {
    const { settings, server } = this;
    const { model } = server;
    const sampling = settings.sampling({ hasDrafts: model?.speculators.length > 0 });
    const begun = begunMessage(answer);
    const whole = [...requestMessages(this.turns, prompt, settings.systemPrompt), ...(begun ? [begun] : [])];
    const limits = { tokenLimit: model?.max_model_len ?? Infinity, maxTokens: sampling.max_tokens };
    const form = begun ? { continue_final_message: true } : {};
    const name = this.model();
    this.goOnWith(name);
    const options = { apiKey: this.apiKey(), signal };
    const { messages, numLeftOut } = await fitContext(whole, { ...limits, fields: { model: name, ...form }, ...options });
    answer.numLeftOut = numLeftOut;
    if (begun) delete sampling.response_format; // a grammar holds whole answers only
    return { model: name, messages, ...sampling, ...form };
  }

  endEarly(answer, error) {
    if (error.name === "AbortError") {
      answer.state = "stopped";
      this.announce("Stopped.");
    } else {
      answer.state = error.status === 401 ? "refused" : "failed";
      answer.error = explain(error);
    }
  }

  async save(conversation = this.conversation) {
    await this.store.save(conversation);
    if (conversation === this.conversation) this.showChanged();
    this.dispatchEvent(new Event("saved"));
  }

  /** Show what another tab has added. */
  showChanged() {
    keepingBottom(() => this.showTurns());
  }

  /** Show the path of the conversation. Turns that answer the same message keep their view, and so focus and scroll. */
  showTurns() {
    const old = new Map(this.views.map((view) => [view.turn.prompt.parent, view]));
    this.views = this.turns.map((turn) => {
      const view = old.get(turn.prompt.parent) ?? new TurnView(this.actions);
      view.show(turn, this.versionsOf(turn), this.waitingFor);
      return view;
    });
    const elements = this.views.map((view) => view.element);
    elements.forEach((element, i) => {
      if (this.log.children[i] !== element) this.log.insertBefore(element, this.log.children[i] ?? null);
    });
    while (this.log.children.length > elements.length) this.log.lastChild.remove();
    this.dispatchEvent(new Event("change"));
  }

  versionsOf({ prompt, answer }) {
    return { prompts: this.conversation.versions(prompt), answers: answer ? this.conversation.versions(answer) : [] };
  }

  show(answer) {
    // Screen readers wait for the end of an answer instead of reading every piece.
    this.log.setAttribute("aria-busy", String(Boolean(this.running)));
    const view = this.views.find((it) => it.answer === answer);
    keepingBottom(() => {
      view?.update(this.waitingFor);
      this.dispatchEvent(new Event("change"));
    });
  }

  announce(text) {
    this.dispatchEvent(new CustomEvent("announce", { detail: text }));
  }
}
