// Shows the server's state: a notice of problems, the model and its facts, the row of live numbers.

import { drawExperts, listFacts, liveNumbers, modelFacts, modelLine, welcomeText } from "./facts.js";
import { setText } from "./set_text.js";
import { tr } from "./translate.js";

const UNLOADED = "unloaded";
const at = (id) => document.getElementById(id);

export class ServerView {
  /** `hasKey()`: whether a key was given; `lastAnswer()`: the answer whose numbers are shown. */
  constructor(server, { hasKey, lastAnswer }) {
    Object.assign(this, { server, hasKey, lastAnswer });
    this.shownModel = null; // which one, and when it was loaded
  }

  show() {
    const { server } = this;
    const notices = {
      loading: tr("The server is loading the model. The page goes on as soon as it is ready."),
      refusing: server.reason,
      lost: tr("No connection to the server. Trying again…"),
      locked: this.hasKey() ? tr("The server did not accept this API key.") : tr("This server asks for an API key."),
    };
    setText(at("notice"), notices[server.state] ?? "");
    const isLocked = server.state === "locked";
    const wasLocked = !at("key-form").hidden;
    at("key-form").hidden = !isLocked;
    if (isLocked && !wasLocked) at("api-key").focus();
    if (server.model) this.showModel(server.model);
    else if (server.state === "ready") this.showUnloaded();
    this.showNumbers();
  }

  /** One of several models, which is not in memory now. */
  showUnloaded() {
    if (this.shownModel === UNLOADED) return;
    this.shownModel = UNLOADED;
    document.title = "moeflow";
    at("model-name").textContent = "moeflow"; // the choice names it
    at("model-line").textContent = tr("Loaded when you first ask it");
    at("welcome-text").textContent = tr("This server has several models, and loads the one that you ask.");
    at("expert-strip").hidden = true;
    at("model-facts").replaceChildren();
    at("drafts-field").hidden = true;
  }

  showModel(model) {
    const shown = `${model.created} ${model.name}`;
    if (this.shownModel === shown) return;
    this.shownModel = shown;
    document.title = `${model.name} · moeflow`;
    at("model-name").textContent = model.name;
    at("model-line").textContent = modelLine(model);
    at("welcome-text").textContent = welcomeText(model);
    drawExperts(at("expert-strip"), model);
    document.documentElement.classList.toggle("is-dense", !model.num_experts);
    listFacts(at("model-facts"), modelFacts(model));
    at("drafts-field").hidden = model.speculators.length === 0;
  }

  showNumbers() {
    const { server } = this;
    const stats = server.state === "ready" ? server.stats : null;
    const answer = this.lastAnswer();
    for (const [name, text] of Object.entries(liveNumbers(stats, answer))) setText(at(`number-${name}`), text);
  }
}
