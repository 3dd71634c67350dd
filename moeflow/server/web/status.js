// Watches the server: its reachability, the loading of the model, its activity. Rests while the tab is hidden.

import { askJson } from "./api.js";

const PERIOD_MS = { connecting: 1000, loading: 1000, ready: 2000, refusing: 3000, lost: 3000 };

/** Emits "change" whenever `state` or `stats` may be new, and "ready" when the server has come to be so. */
export class ServerStatus extends EventTarget {
  /** `apiKey()` gives the key to send, or null; `modelName()`: the watched model, or undefined: the only one. */
  constructor(apiKey, modelName) {
    super();
    Object.assign(this, { apiKey, modelName });
    this.state = "connecting"; // connecting, ready, loading, refusing, lost, locked (asks for an API key)
    this.reason = ""; // the server's, for refusing
    this.stats = null; // the newest answer of /stats
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** The model's facts; null until the server has told them. */
  get model() {
    return this.stats?.model ?? null;
  }

  /** Whether the server, as far as we know, is past loading. */
  get isLoaded() {
    return this.state !== "connecting" && this.state !== "loading";
  }

  /** Look once now, then again and again. A locked server is looked at again when a key is there. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    await this.look();
    clearTimeout(this.timer); // another poll may have come in between
    if (this.state in PERIOD_MS) this.timer = setTimeout(() => this.poll(), PERIOD_MS[this.state]);
  }

  /** Return once the server is past loading, whatever then is its state. */
  async untilLoaded(signal) {
    while (!this.isLoaded) {
      await this.look();
      signal.throwIfAborted();
      if (!this.isLoaded) await pause(PERIOD_MS.loading, signal);
    }
  }

  async look() {
    try {
      const wasReady = this.state === "ready"; // if not, the name may be of a server that was here before
      if (!wasReady) await askJson("ready");
      const name = wasReady ? this.modelName() : undefined;
      const stats = await askJson(statsPath(name), { apiKey: this.apiKey() });
      if (wasReady && name !== this.modelName()) return; // another was chosen meanwhile, and is asked about by itself
      this.stats = stats;
      this.become("ready");
    } catch (error) {
      this.become(stateAfter(error), error.message);
    }
  }

  become(state, reason = "") {
    const isNew = this.state !== state;
    this.state = state;
    this.reason = reason;
    this.dispatchEvent(new Event("change"));
    if (isNew && state === "ready") this.dispatchEvent(new Event("ready"));
  }
}

/** The engines also observe their passes while a page is open, so that its views have something to show. */
function statsPath(name) {
  return name ? `stats?watch=true&model=${encodeURIComponent(name)}` : "stats?watch=true";
}

function stateAfter(error) {
  if (error.status === 401) return "locked";
  if (error.code === "model_loading") return "loading";
  return error.status ? "refusing" : "lost";
}

function pause(durationMs, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, durationMs);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
