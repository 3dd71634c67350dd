// The page's wiring: which control does what, and where the server's state is shown.

import { Chat } from "./chat.js";
import { expertFacts } from "./experts.js";
import { drawExperts, listFacts, liveNumbers, modelFacts, modelLine, rankFacts, replicaFacts, welcomeText } from "./facts.js";
import { Settings } from "./settings.js";
import { ServerStatus } from "./status.js";
import { Stored } from "./storage.js";

const at = (id) => document.getElementById(id);
const storedKey = new Stored("sessionStorage", "api-key");
const apiKey = () => storedKey.read();
const settings = new Settings(at("settings-form"));
const server = new ServerStatus(apiKey);
const chat = new Chat({ log: at("conversation"), server, settings, apiKey, buttons: { onCopy: copy, onRetry: retry } });
let shownModel = null; // when the model was loaded whose facts are shown
let statsBefore = null; // the reading of /stats before the newest
let statsShown = null;
let setAside = []; // turns of the conversation before this one

// ---- showing

function showChat() {
  at("welcome").hidden = chat.turns.length > 0;
  at("restore").hidden = setAside.length === 0;
  at("send").hidden = Boolean(chat.running);
  at("stop").hidden = !chat.running;
  showNumbers();
}

function showServer() {
  const notices = {
    loading: "The server is loading the model. The page goes on as soon as it is ready.",
    refusing: server.reason,
    lost: "No connection to the server. Trying again…",
    locked: apiKey() ? "The server did not accept this API key." : "This server asks for an API key.",
  };
  const notice = notices[server.state] ?? "";
  // Writing the same text again would make a screen reader say it again.
  if (at("notice").textContent !== notice) at("notice").textContent = notice;
  const isLocked = server.state === "locked";
  const wasLocked = !at("key-form").hidden;
  at("key-form").hidden = !isLocked;
  if (isLocked && !wasLocked) at("api-key").focus();
  if (server.model) showModel(server.model);
  showNumbers();
}

function showModel(model) {
  if (shownModel === model.created) return;
  shownModel = model.created;
  document.title = `${model.name} · moeflow`;
  at("model-name").textContent = model.name;
  at("model-line").textContent = modelLine(model);
  at("welcome-text").textContent = welcomeText(model);
  drawExperts(at("expert-strip"), model);
  listFacts(at("model-facts"), modelFacts(model));
  at("guesses-field").hidden = model.speculators.length === 0;
}

function showNumbers() {
  const stats = server.state === "ready" ? server.stats : null;
  if (stats !== statsShown) [statsBefore, statsShown] = [statsShown, stats];
  const latest = chat.turns.findLast((turn) => turn.measured);
  for (const [name, text] of Object.entries(liveNumbers(stats, latest?.measured))) {
    at(`number-${name}`).textContent = text;
  }
  showExperts(stats);
  showReplicas(stats);
  showRanks(stats);
}

/** Of experts that come from disk: how many are in memory, how often they were there, what is read. */
function showExperts(stats) {
  const facts = expertFacts(stats, statsBefore);
  at("experts").hidden = facts.length === 0;
  listFacts(at("expert-facts"), facts);
}

/** Of several engines side by side: how each is. */
function showReplicas(stats) {
  const facts = replicaFacts(stats);
  at("replicas").hidden = facts.length === 0;
  listFacts(at("replica-facts"), facts);
}

/** Of processes that share the model: what each has, and how long it has waited for the others. */
function showRanks(stats) {
  const facts = rankFacts(stats);
  at("ranks").hidden = facts.length === 0;
  listFacts(at("rank-facts"), facts);
}

function announce(text) {
  at("announcer").textContent = text;
}

async function copy(text, button) {
  const isCopied = await writeClipboard(text);
  announce(isCopied ? "Copied." : "The browser does not allow copying here.");
  button.dataset.label ??= button.textContent;
  button.textContent = isCopied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = button.dataset.label), 1500);
}

/** Browsers offer a clipboard only to pages on https and on this machine. */
async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

// ---- doing

function submit(prompt) {
  if (chat.running || !prompt.trim()) return;
  chat.submit(prompt.trim());
  focusAfterSend();
}

function submitPrompt() {
  const box = at("prompt");
  const prompt = box.value;
  if (chat.running) return;
  box.value = "";
  fitPrompt();
  submit(prompt);
}

function retry() {
  if (chat.running) return;
  chat.retry();
  focusAfterSend();
}

function focusAfterSend() {
  at(hasKeyboard() ? "prompt" : "stop").focus();
}

/** Whether a hardware keyboard is likely. On a phone, focus in the prompt box raises keys that cover the page. */
function hasKeyboard() {
  return matchMedia("(hover: hover)").matches;
}

function fitPrompt() {
  const box = at("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function stop() {
  chat.stop();
  at("prompt").focus();
}

function startOver(turns) {
  const old = chat.replace(turns);
  if (old.length) setAside = old;
  showChat();
  at("prompt").focus();
}

async function useKey() {
  storedKey.write(at("api-key").value.trim());
  at("api-key").value = "";
  await server.poll();
  if (server.state === "locked") return;
  at("prompt").focus();
  if (chat.turns.at(-1)?.state === "refused") retry();
}

function clearAll() {
  if (!confirm("Clear the conversation, the settings and the API key from this browser?")) return;
  chat.replace([]);
  setAside = [];
  settings.reset();
  storedKey.remove();
  at("settings").close();
  showChat();
  announce("Everything is cleared.");
}

// ---- wiring

function onSubmit(id, action) {
  at(id).addEventListener("submit", (event) => {
    event.preventDefault();
    action();
  });
}

function onClick(id, action) {
  at(id).addEventListener("click", action);
}

onSubmit("prompt-form", submitPrompt);
onSubmit("key-form", useKey);
onClick("stop", stop);
onClick("new-conversation", () => startOver([]));
onClick("restore", () => startOver(setAside));
onClick("open-settings", () => at("settings").showModal());
onClick("reset-settings", () => settings.reset());
onClick("clear-all", clearAll);
for (const button of at("examples").querySelectorAll("button")) {
  button.addEventListener("click", () => submit(button.textContent));
}

at("prompt").addEventListener("input", fitPrompt);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submitPrompt();
  } else if (event.key === "Escape") {
    chat.stop();
  }
});

chat.addEventListener("change", showChat);
chat.addEventListener("announce", (event) => announce(event.detail));
server.addEventListener("change", showServer);
// Before the browser breaks the stream off, which would look like a failure. Phones may tell only the second.
for (const leaving of ["beforeunload", "pagehide"]) addEventListener(leaving, () => chat.leave());

showChat();
if (hasKeyboard()) at("prompt").focus();
server.poll();
