// The conversation at work: asks for answers to one prompt at a time, and shows every turn as it stands.
// Emits "change" for anything new and "saved" once stored. "begin" and "end" enclose the answers to a prompt, which are in
// `detail`. "refuse" has a notice for the user, and "announce" a text for screen readers.

import { addStyles } from "../add_styles.js";
import { Conversation } from "../conversations/conversation.js";
import { changedValues, samplingFields } from "../presets/values.js";
import { tr } from "../translate.js";
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
  /** `log` is the element that holds the turns; `apiKey()` gives the key to send, `model()` the name to ask for,
   *  `secondModel()` the name of one to ask too, or null. `factsOf(name)` gives the facts of a model, and `statusOf(name)`
   *  its state where the server has several. `onCopy(text, button)` copies, `onRetryWith(turn)` lets the
   *  user choose other settings. `onWhy(requestId)` shows where the time of a request went, and `onExperts(requestId)` the
   *  experts of its tokens. */
  constructor({ log, server, settings, store, apiKey, model, factsOf, statusOf, secondModel, onCopy, onRetryWith, onWhy, onExperts }) {
    super();
    Object.assign(this, { log, server, settings, store, apiKey, model, factsOf, statusOf, secondModel });
    this.conversation = this.newConversation();
    this.running = null; // AbortController of the answers being written
    this.compared = new Set(); // ids of the prompts whose answers are shown side by side
    this.Comparison = null; // the class that shows them, once it is needed
    this.views = [];
    this.actions = {
      onCopy,
      onWhy,
      onExperts,
      onRetry: (turn) => this.answer(turn.prompt),
      onRetryProbable: (turn, answer) => this.answerProbable(turn.prompt, answer),
      onRetryWith,
      onCompare: (turn, isCompared) => this.compare(turn.prompt, isCompared),
      onUse: (answer) => this.use(answer),
      onEdit: (turn, content) => this.edit(turn.prompt, content),
      onContinue: (turn, answer) => this.continue(turn.prompt, answer),
      onStop: () => this.stop(),
      onChoose: (message) => this.choose(message),
      announce: (text) => this.announce(text),
    };
  }

  get turns() {
    return this.conversation.turns();
  }

  /** What a running answer without text waits for. */
  waitingFor({ asked }) {
    if (!this.server.isLoaded) return tr("Waiting for the model to load…");
    const status = asked ? this.statusOf(asked.model) : null;
    if (status === "loading") return tr("Loading {model}…", { model: asked.model });
    if (status === "unloaded") return tr("Waiting until there is memory for {model}…", { model: asked.model });
    return tr("Waiting for the first token…");
  }

  /** The answers being written that are on the page. */
  get runningAnswers() {
    return this.conversation.messages.filter(({ state }) => state === "running");
  }

  /** Whether one of them has no token yet. */
  get isWaiting() {
    return this.runningAnswers.some(({ measured }) => !measured);
  }

  /** Show anew what running answers wait for. */
  showRunning() {
    for (const answer of this.runningAnswers) this.show(answer);
  }

  /** The last answer that has numbers. */
  get lastMeasured() {
    return this.views.findLast((view) => view.answer?.measured)?.answer;
  }

  submit(content, files = []) {
    if (!this.isFree()) return false;
    return this.answerBoth(this.conversation.addPrompt(content, files));
  }

  /** Request an answer to a prompt; an earlier answer stays as another version. `asked` is what this answer alone is asked
   *  with, if it is not what the conversation is held with; then both are shown. Returns whether that began. */
  answer(prompt, asked = null) {
    if (!this.isFree()) return false;
    if (asked) this.beginComparison(prompt);
    this.begin(prompt, [this.conversation.addAnswer(prompt, asked)]);
    return true;
  }

  /** Request an answer to a new prompt, and one of the second model, if there is such. */
  answerBoth(prompt) {
    const second = this.secondModel();
    if (!second) return this.answer(prompt);
    const answers = [this.model(), second].map((model) => this.conversation.addAnswer(prompt, this.own({ model })));
    this.conversation.choose(answers[0]);
    this.goOnWith(this.model());
    this.beginComparison(prompt);
    this.begin(prompt, answers);
    return true;
  }

  /** Ask again with what an answer was asked with, and keep the probabilities of the tokens. */
  answerProbable(prompt, answer) {
    const values = { ...this.settings.valuesFor(answer, this.conversation), token_probabilities: true };
    return this.answer(prompt, this.own({ model: this.modelFor(answer), values }));
  }

  /** What an answer is asked with that does not follow its conversation. All but `model` is as the conversation has it,
   *  unless given. */
  own({ model, preset = this.settings.preset, values = this.settings.valuesOf(this.conversation) }) {
    return { model, preset: this.settings.presets.name(preset), values: changedValues(values), isOwn: true };
  }

  /** Have the model write on at an answer that ended too early. */
  continue(prompt, answer) {
    if (!this.isFree()) return;
    Object.assign(answer, { state: "running", cutOff: false, error: null });
    this.begin(prompt, [answer]);
  }

  begin(prompt, answers) {
    this.conversation.updatedAt = Date.now();
    this.showTurns();
    this.save();
    this.ask(prompt, answers);
  }

  /** Ask something else in the place of a prompt, which stays as another version. */
  edit(prompt, content) {
    return this.isFree() && this.answerBoth(this.conversation.addPrompt(content, prompt.files, prompt.parent));
  }

  /** Show the answers to a prompt side by side, or one of them. */
  compare(prompt, isCompared) {
    if (isCompared) this.beginComparison(prompt);
    else this.compared.delete(prompt.id);
    this.showTurns();
  }

  async beginComparison(prompt) {
    this.compared.add(prompt.id);
    if (this.Comparison) return;
    await addStyles("../compare/compare.css", import.meta.url);
    this.Comparison = (await import("../compare/comparison.js")).Comparison;
    keepingBottom(() => this.showTurns());
  }

  /** Continue the conversation after one of the compared answers, with its model. */
  use(answer) {
    if (!this.isFree()) return;
    this.compared.delete(answer.parent);
    if (answer.asked?.model && this.factsOf(answer.asked.model)) this.conversation.useModel(answer.asked.model);
    this.choose(answer);
    this.dispatchEvent(new CustomEvent("use", { detail: answer }));
  }

  /** Show a message, and so the path to it. Return whether that could be. */
  choose(message) {
    if (!this.isFree()) return false;
    this.conversation.openBranch(message);
    this.showTurns();
    this.save();
    return true;
  }

  /** Delete a message and all that follows it. Return what `restore` takes; null: an answer is being written. */
  remove(message) {
    if (!this.isFree()) return null;
    const removed = this.conversation.remove(message);
    this.showTurns();
    this.save();
    return removed;
  }

  restore(removed) {
    this.conversation.restore(removed);
    this.showTurns();
    this.save();
  }

  /** Bring the turn of a message into view. */
  reveal(message) {
    const view = this.views.find(({ turn }) => turn.prompt === message || turn.answer === message);
    view?.element.scrollIntoView({ block: "start" });
  }

  /** Whether no answer is being written; if one is, show a notice. */
  isFree() {
    if (this.running) {
      const reason = tr("An answer is being written: stop it first, or wait for its end.");
      this.dispatchEvent(new CustomEvent("refuse", { detail: reason }));
    }
    return !this.running;
  }

  /** Have the conversation go on with another model. A running answer is still that of the model before. */
  goOnWith(model) {
    if (this.conversation.useModel(model)) this.save();
  }

  newConversation() {
    return new Conversation({ preset: this.settings.presets.forNew });
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

  /** Get all answers to a prompt, at once. */
  async ask(prompt, answers) {
    const controller = new AbortController();
    const { conversation } = this;
    this.running = controller;
    for (const answer of answers) this.show(answer);
    toBottom();
    const saving = setInterval(() => this.save(conversation), SAVE_MS);
    this.dispatchEvent(new Event("begin"));
    await Promise.all(answers.map((answer) => this.fill(prompt, answer, controller.signal)));
    clearInterval(saving);
    if (this.running === controller) this.running = null;
    this.announceEnd(answers);
    this.save(conversation);
    for (const answer of answers) this.show(answer);
    this.server.poll();
    this.dispatchEvent(new CustomEvent("end", { detail: answers }));
  }

  async fill(prompt, answer, signal) {
    try {
      await this.server.untilLoaded(signal);
      this.show(answer);
      const body = await this.request(prompt, answer, signal);
      await fillAnswer(answer, body, { apiKey: this.apiKey(), signal, onChange: smoothly(() => this.show(answer)) });
      answer.state = "done";
    } catch (error) {
      endEarly(answer, error);
    }
    this.show(answer); // another may be written still
  }

  /** The body of the request for an answer, or for the rest of an answer that has begun. */
  async request(prompt, answer, signal) {
    const { settings, conversation } = this;
    const name = this.modelFor(answer);
    const model = this.factsOf(name);
    const values = settings.valuesFor(answer, conversation);
    const sampling = samplingFields(values, { hasDrafts: model?.speculators?.length > 0 });
    this.note(answer, name, values);
    const begun = begunMessage(answer);
    const whole = [...requestMessages(this.turns, prompt, values.system), ...(begun ? [begun] : [])];
    const limits = { tokenLimit: model?.max_model_len ?? Infinity, maxTokens: sampling.max_tokens };
    const form = begun ? { continue_final_message: true } : {};
    if (!answer.asked.isOwn) this.goOnWith(name);
    const options = { apiKey: this.apiKey(), signal };
    const { messages, numLeftOut } = await fitContext(whole, { ...limits, fields: { model: name, ...form }, ...options });
    answer.numLeftOut = numLeftOut;
    if (begun) delete sampling.response_format; // a grammar holds whole answers only
    return { model: name, messages, ...sampling, ...form };
  }

  /** The model to ask for an answer: its own, if it has one that is served, or else that of the conversation. */
  modelFor({ asked }) {
    return asked?.isOwn && this.factsOf(asked.model) ? asked.model : this.model();
  }

  /** Note with what an answer is asked for. The system prompt is noted only where it is not the conversation's. */
  note(answer, model, values) {
    if (answer.asked?.isOwn) {
      answer.asked.model = model;
      return;
    }
    const { system, ...others } = changedValues(values);
    answer.asked = { model: model ?? "", preset: this.settings.presets.name(this.conversation.preset), values: others, isOwn: false };
  }

  announceEnd(answers) {
    const isStopped = answers.some(({ state }) => state === "stopped");
    if (isStopped) this.announce(tr("Stopped."));
    else if (answers.every(({ state }) => state === "done")) this.announce(answers.length > 1 ? tr("Both answers complete.") : tr("Answer complete."));
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
      view.show(turn, this.versionsOf(turn), (answer) => this.waitingFor(answer), this.compared.has(turn.prompt.id) && this.Comparison);
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
    const view = this.views.find((it) => it.shows(answer));
    keepingBottom(() => {
      view?.update(answer);
      this.dispatchEvent(new Event("change"));
    });
  }

  announce(text) {
    this.dispatchEvent(new CustomEvent("announce", { detail: text }));
  }
}

function endEarly(answer, error) {
  if (error.name === "AbortError") {
    answer.state = "stopped";
    return;
  }
  answer.state = error.status === 401 ? "refused" : "failed";
  answer.error = explain(error);
}
