// The conversation as data: turns of a prompt and its answer, kept until the tab closes.
// A turn whose answer never came is shown but not sent: chat templates want user and assistant to alternate.

import { Stored } from "./storage.js";

export class Conversation {
  constructor() {
    this.stored = new Stored("sessionStorage", "conversation");
    this.turns = (this.stored.read() ?? []).map(asLeft);
  }

  get last() {
    return this.turns.at(-1);
  }

  add(prompt) {
    const turn = newTurn(prompt);
    this.turns.push(turn);
    this.save();
    return turn;
  }

  /** Forget the last answer, so that its prompt can be asked again. */
  reopenLast() {
    return Object.assign(this.last, newTurn(this.last.prompt));
  }

  /** Messages of a request that asks for the last turn's answer. */
  messages(systemPrompt) {
    const messages = systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
    for (const turn of this.turns.slice(0, -1)) {
      if (!turn.answer) continue;
      messages.push({ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answer });
    }
    return [...messages, { role: "user", content: this.last.prompt }];
  }

  /** Replace all turns; returns the old ones. */
  replace(turns) {
    const old = this.turns;
    this.turns = turns;
    this.save();
    return old;
  }

  save() {
    // What was guessed is larger than all else, and would crowd out the conversation.
    this.stored.write(this.turns.map((turn) => ({ ...turn, passes: [] })));
  }
}

function newTurn(prompt) {
  return {
    prompt,
    answer: "",
    state: "running", // running, done, stopped, failed, refused (for want of an API key)
    error: null, // what to tell the user, when failed
    cutOff: false, // the answer reached max tokens
    measured: null, // see answer.js
    passes: [], // what was guessed in each, if asked for: `token_trees` of the API
  };
}

/** A reload ends a running answer, as the stop button does. */
function asLeft(turn) {
  return turn.state === "running" ? { ...turn, state: "stopped" } : turn;
}
