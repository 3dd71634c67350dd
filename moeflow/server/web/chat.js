// The conversation at work: asks for answers, one at a time, and shows every turn as it stands.
// Emits "change" when anything is new, and "announce" with what a screen reader should say.

import { ApiError } from "./api.js";
import { fillAnswer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { keepingBottom, toBottom } from "./scroll.js";
import { TurnView } from "./turn_view.js";

export class Chat extends EventTarget {
  /** `log` is the element that holds the turns; `apiKey()` gives the key to send; `buttons` are TurnView’s. */
  constructor({ log, server, settings, apiKey, buttons }) {
    super();
    Object.assign(this, { log, server, settings, apiKey, buttons });
    this.conversation = new Conversation();
    this.running = null; // AbortController of the answer being written
    this.showAll();
  }

  get turns() {
    return this.conversation.turns;
  }

  submit(prompt) {
    const turn = this.conversation.add(prompt);
    const view = new TurnView(turn, this.buttons);
    this.views.push(view);
    this.log.append(view.element);
    return this.ask(turn, view);
  }

  retry() {
    return this.ask(this.conversation.reopenLast(), this.views.at(-1));
  }

  stop() {
    this.running?.abort();
  }

  /** Put other turns in the place of all; returns those that were there. */
  replace(turns) {
    this.stop();
    const old = this.conversation.replace(turns);
    this.showAll();
    return old;
  }

  /** The page is about to go: end the running answer and keep what came. */
  leave() {
    this.stop();
    this.conversation.save();
  }

  async ask(turn, view) {
    const controller = new AbortController();
    this.running = controller;
    this.show(view);
    toBottom();
    try {
      await this.server.untilLoaded(controller.signal);
      this.show(view);
      await fillAnswer(turn, this.requestBody(), {
        apiKey: this.apiKey(),
        signal: controller.signal,
        onChange: oncePerFrame(() => this.show(view)),
      });
      turn.state = "done";
      this.announce("Answer complete.");
    } catch (error) {
      this.endEarly(turn, error);
    } finally {
      if (this.running === controller) this.running = null;
      this.conversation.save();
      this.show(view);
      this.server.poll();
    }
  }

  requestBody() {
    const { settings, server, conversation } = this;
    const sampling = settings.sampling({ hasGuesses: server.model?.speculators.length > 0 });
    return { model: server.model?.name, messages: conversation.messages(settings.systemPrompt), ...sampling };
  }

  endEarly(turn, error) {
    if (error.name === "AbortError") {
      turn.state = "stopped";
      this.announce("Stopped.");
    } else {
      turn.state = error.status === 401 ? "refused" : "failed";
      turn.error = explain(error);
    }
  }

  showAll() {
    this.views = this.turns.map((turn) => new TurnView(turn, this.buttons));
    this.log.replaceChildren(...this.views.map((view) => view.element));
    toBottom();
    this.dispatchEvent(new Event("change"));
  }

  show(view) {
    // Screen readers wait for the end of an answer instead of reading every piece.
    this.log.setAttribute("aria-busy", String(Boolean(this.running)));
    const isLoading = !this.server.isLoaded;
    keepingBottom(() => view.update(isLoading ? "Waiting for the model to load…" : "Waiting for the first token…"));
    this.dispatchEvent(new Event("change"));
  }

  announce(text) {
    this.dispatchEvent(new CustomEvent("announce", { detail: text }));
  }
}

function explain(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return "The page itself failed; the browser’s console says where.";
  }
  if (error.status === 401) return "The server asks for an API key; enter it below.";
  if (error.status === 429) {
    const when = error.retryAfterS ? `in ${Math.ceil(error.retryAfterS)} s` : "later";
    return `The server is busy; try again ${when}.\n${error.message}`;
  }
  if (error.code === "context_length_exceeded") return `${error.message}\nA new conversation starts with an empty context.`;
  return error.message;
}

function oncePerFrame(action) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      action();
    });
  };
}
