// Prepares the first paint, and loads the modules after it: the chosen colours, and room for the panels that will open.
// Nothing moves later. See theme.js, conversations/history_view.js, inspect/inspector.js and translate.js.

const LATEST_MS = 500; // modules wait no longer: a page in a hidden tab paints nothing

const root = document.documentElement;

/** A value that the page has kept; undefined where nothing can be kept. */
function kept(name) {
  try {
    return JSON.parse(localStorage.getItem(`moeflow.${name}`));
  } catch {
    return undefined;
  }
}

root.dataset.theme = kept("theme");
root.classList.toggle("has-history", matchMedia("(min-width: 64rem)").matches && kept("history-open") !== false);
root.classList.toggle("has-inspector", matchMedia("(min-width: 80rem)").matches && new URLSearchParams(location.search).has("inspect"));
root.classList.toggle("is-opening", location.hash.length > 1); // a conversation, in the place of the welcome
root.classList.toggle("is-translating", ["de", "fr", "ja", "zh"].includes(kept("language") ?? navigator.language.split("-")[0]));

let isStarted = false;

/** Load all modules, once. Before the first paint they would take its share of the network. */
function start() {
  const modules = document.getElementById("modules");
  if (isStarted || !modules) return;
  isStarted = true;
  document.head.append(document.importNode(modules.content, true));
}

const isHidden = root.classList.contains("is-translating"); // until a module shows it
new PerformanceObserver(start).observe({ type: "paint", buffered: true });
document.addEventListener("DOMContentLoaded", () => (isHidden ? start() : setTimeout(start, LATEST_MS)));
