// The page's wiring: which control does what.

import { addStyles } from "./add_styles.js";
import { askBlob, askJson } from "./api.js";
import { Chat } from "./chat/chat.js";
import { ContextMeter } from "./chat/context_meter.js";
import { MeterView } from "./chat/meter_view.js";
import { offerBottom } from "./chat/scroll.js";
import { ModelStatuses } from "./compare/model_statuses.js";
import { SecondModel } from "./compare/second_model.js";
import { Composer } from "./composer.js";
import { HeadView } from "./conversations/head_view.js";
import { HistoryView } from "./conversations/history_view.js";
import { Library } from "./conversations/library.js";
import { ConversationStore } from "./conversations/store.js";
import { Inspector } from "./inspect/inspector.js";
import { offerLanguages, takeUnsent } from "./language_choice.js";
import { lazily } from "./lazily.js";
import { ModelChoice } from "./models.js";
import { PresetChoice } from "./presets/preset_choice.js";
import { Prompts } from "./prompts/prompts.js";
import { ServerView } from "./server_view.js";
import { setText } from "./set_text.js";
import { Settings } from "./settings.js";
import { Shortcuts } from "./shortcuts.js";
import { ServerStatus } from "./status.js";
import { forgetAll, Stored } from "./storage.js";
import { ThemeChoice } from "./theme.js";
import { tr, useLanguage } from "./translate.js";

await useLanguage(); // before anything is written

const at = (id) => document.getElementById(id);
const storedKey = new Stored("sessionStorage", "api-key");
const apiKey = () => storedKey.read();
const settings = new Settings(at("settings-form"), () => chat.conversation);
const models = new ModelChoice(at("model-choice"), at("model-name"), { apiKey, held: () => library.model });
const server = new ServerStatus(apiKey, () => models.name);
const store = new ConversationStore();
const model = () => models.name ?? server.model?.name;
const factsOf = (name) => (server.model?.name === name ? server.model : models.cards.get(name));
const second = new SecondModel(at("second"), models);
const statuses = new ModelStatuses({ apiKey, isWaiting: () => models.names.length > 1 && chat.isWaiting, onChange: () => chat.showRunning() });
const chat = new Chat({
  ...{ log: at("conversation"), server, settings, store, apiKey, model, factsOf, onCopy: copy, onRetryWith: tryAgainWith },
  onWhy: (requestId) => inspector.show("requests", requestId),
  onExperts: (requestId) => inspector.show("experts", { request: requestId }),
  statusOf: (name) => statuses.of(name),
  secondModel: () => second.name,
});
const head = new HeadView(at("conversation-head"), settings.presets, () => chat.conversation, {
  onPreset: usePreset,
  onSystem: (text) => {
    chat.conversation.change("system", text);
    meter.update();
  },
  onKeep: () => chat.save(),
});
const presetChoice = new PresetChoice(at("preset"), settings.presets, (id) => {
  settings.keep();
  usePreset(id);
});
let numWriting = 0; // answers that have a token, and are not complete
let presetManager = null; // until the settings are opened
const meter = new ContextMeter(new MeterView(at("context-meter"), at("context-warning"), at("send")), {
  ...{ chat, apiKey, draft: () => composer.draft, isOneOfSeveral: () => models.names.length > 1 },
  facts: () => (server.state === "ready" && server.model?.name === model() ? server.model : null),
});
const tryAgain = lazily(async () => {
  const { TryAgain } = await import("./compare/try_again.js");
  const onAsk = (prompt, wish) => chat.answer(prompt, chat.own({ ...wish, model: wish.model ?? model() }));
  return new TryAgain(at("try-again"), { settings, models, fields: at("settings-fields"), onAsk });
});
const composer = new Composer(at("prompt-form"), () => Boolean(chat.running) && !library.opening);
const prompts = new Prompts(at, composer, announce);
const library = new Library(chat, store, showConversations);
const conversations = new HistoryView(at("history"), at("open-history"), store, {
  current: () => chat.conversation,
  onRename: (id, name) => library.rename(id, name),
  onDelete: (id) => library.remove(id),
  onBranches: showBranches,
  onRestore: (conversation) => library.restore(conversation),
  onExport: (kind) => library.export(kind).then(() => complain(""), (error) => complain(error.message)),
  onImport: importFiles,
});
const branches = lazily(async () => {
  await addStyles("./branches.css", import.meta.url);
  const { BranchesView } = await import("./conversations/branches_view.js");
  return new BranchesView(at("branches"), chat);
});
const theme = new ThemeChoice(at("theme"));
offerLanguages(at("language"), at("language-hint"), chat, composer);
const shortcuts = new Shortcuts(at("shortcuts"), [
  { keys: "Enter", label: tr("Send the message") },
  { keys: "Shift+Enter", label: tr("Start a new line") },
  { keys: "/", label: tr("Insert a prompt") },
  { keys: "Escape", label: tr("Stop the answer, or go to the message"), action: () => (chat.running ? stop() : composer.focus()) },
  { keys: "Control+Shift+O", label: tr("New conversation"), action: begin },
  { keys: "Control+Shift+S", label: tr("Conversations"), action: () => conversations.toggle() },
  { keys: "Control+Shift+C", label: tr("Copy the last answer"), action: () => pressLast(".is-chosen .copy, .turn > .answer .copy") },
  { keys: "Control+Shift+Enter", label: tr("Try again"), action: () => pressLast(".retry") },
  { keys: "Control+Shift+Y", label: tr("Try again with other settings"), action: () => pressLast(".retry-with, .with") },
  { keys: "Control+Shift+D", label: tr("Answers side by side, or one"), action: () => pressLast(".compare, .one") },
  { keys: "Control+Shift+M", label: tr("Ask a second model too, or one only"), action: () => second.press() },
  { keys: "Control+Shift+E", label: tr("Edit the last question"), action: () => pressLast(".edit") },
  { keys: "Control+Shift+U", label: tr("System prompt of this conversation"), action: () => head.edit() },
  { keys: "Control+Shift+L", label: tr("Prompt library"), action: () => prompts.manage() },
  { keys: "Control+Shift+X", label: tr("Inspect"), action: () => inspector.toggle() },
  { keys: "Control+Shift+B", label: tr("Branches"), action: showBranches },
  { keys: "Control+,", label: tr("Settings"), action: openSettings },
  { keys: "Control+/", label: tr("Keyboard shortcuts"), action: () => shortcuts.show() },
]);
const serverView = new ServerView(server, {
  hasKey: () => Boolean(apiKey()),
  lastAnswer: () => chat.lastMeasured,
});

// For views: ask(path, options) returns JSON, with the key sent and the chosen model named by `?model=`. askFile returns
// a Blob. announce(text) is for screen readers; open(id, argument) shows a view.
const inspector = new Inspector(at("inspector"), at("open-inspector"), { ask, askFile, server, chat, announce, copy });
for (const figure of document.querySelectorAll(".numbers button")) figure.addEventListener("click", () => inspector.show(figure.dataset.view));

// ---- showing

function showChat() {
  at("welcome").hidden = !chat.conversation.isEmpty;
  at("send").hidden = Boolean(chat.running);
  at("stop").hidden = !chat.running;
  serverView.showNumbers();
  watchWriting();
  if (chat.running) meter.follow();
  else meter.update();
}

/** Look at the server when an answer begins or ends: the number of running requests is another. */
function watchWriting() {
  const count = chat.runningAnswers.filter(({ measured }) => measured).length;
  if (count !== numWriting) server.poll();
  numWriting = count;
}

/** Show what the open conversation is held with. */
function showSettings() {
  settings.show();
  head.show();
  presetChoice.show(settings.preset);
  presetManager?.show();
  meter.update();
}

function showConversations() {
  showChat();
  showModel();
  showSettings();
  conversations.show();
}

function showModel() {
  models.show();
  second.show();
  const { missing } = models;
  setText(at("missing-model"), missing && tr("This conversation was held with {missing}, which this server does not have. {model} will answer.", { missing, model: model() }));
}

function announce(text) {
  at("announcer").textContent = text;
}

/** Show a notice until the next message is sent. */
function complain(text) {
  tell(text, { isWrong: true });
}

function tell(text, { isWrong }) {
  at("complaint").textContent = text;
  at("complaint").classList.toggle("complaint", isWrong);
}

async function copy(text, button) {
  const isCopied = await writeClipboard(text);
  announce(isCopied ? tr("Copied.") : tr("The browser does not allow copying here."));
  button.dataset.label ??= button.textContent;
  button.textContent = isCopied ? tr("Copied") : tr("Not allowed");
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

/** Ask the server for JSON about the chosen model. */
function ask(path, options) {
  const url = new URL(path, document.baseURI);
  if (models.name) url.searchParams.set("model", models.name);
  return askJson(url, { ...options, apiKey: apiKey() });
}

/** Ask the server for a file. */
function askFile(path, options) {
  return askBlob(path, { ...options, apiKey: apiKey() });
}

// ---- doing

/** Send a message to the conversation that is open, or about to be. */
async function send({ content, files }) {
  complain("");
  if (!(await library.opened())) {
    composer.putBack({ content, files });
    return;
  }
  chat.submit(content, files);
  library.address();
  at(hasKeyboard() ? "prompt" : "stop").focus();
}

/** Whether a hardware keyboard is likely. On a phone, focus in the prompt box raises keys that cover the page. */
function hasKeyboard() {
  return matchMedia("(hover: hover)").matches;
}

/** Press a button of the last turn: the first that is visible. */
function pressLast(selector) {
  const buttons = [...(at("conversation").lastElementChild?.querySelectorAll(selector) ?? [])];
  buttons.find((button) => button.checkVisibility({ visibilityProperty: true }))?.click();
}

function stop() {
  chat.stop();
  composer.focus();
}

function updateModels() {
  models.update().catch(() => {}); // /stats names one in any case
}

async function openSettings() {
  updateModels(); // one that was loaded since may tell more
  await loadPresetManager().catch(() => {}); // without the server, all other settings are there
  at("settings").showModal();
}

/** Go on after another language was chosen: in the settings, with the unsent message in the box. */
async function goOn(unsent) {
  if (!unsent) return;
  composer.write(unsent);
  await openSettings();
  at("language").focus();
}

/** Hold the open conversation with a preset. */
function usePreset(id) {
  chat.conversation.change("preset", id);
  chat.save();
  showSettings();
}

async function loadPresetManager() {
  if (presetManager) return;
  const { PresetManager } = await import("./presets/preset_manager.js");
  presetManager ??= new PresetManager(at("preset-manager"), settings.presets, { current: () => settings.preset, choose: usePreset, takeDraft: () => settings.takeDraft(), announce });
  presetManager.show();
}

async function showBranches() {
  (await branches()).show();
}

/** Let the user choose the settings of another attempt at an answer. */
async function tryAgainWith(turn) {
  if (!chat.isFree()) return;
  (await tryAgain()).open(turn, chat.conversation);
}

function begin() {
  library.begin();
  composer.focus();
}

async function importFiles(files) {
  try {
    tell(importLine(await library.import(files)), { isWrong: false });
  } catch (error) {
    complain(error.message);
  }
}

function importLine({ numNew, numKnown }) {
  const known = { count: numKnown };
  if (!numNew) return tr(numKnown === 1 ? "Nothing is new: the conversation is already here." : "Nothing is new: all {count} conversations are already here.", known);
  const imported = tr(numNew === 1 ? "One conversation is imported." : "{count} conversations are imported.", { count: numNew });
  if (!numKnown) return imported;
  return `${imported} ${tr(numKnown === 1 ? "One is already here." : "{count} are already here.", known)}`;
}

async function useKey() {
  storedKey.write(at("api-key").value.trim());
  at("api-key").value = "";
  await server.poll();
  if (server.state === "locked") return;
  composer.focus();
  const last = chat.turns.at(-1);
  if (last?.answer?.state === "refused") chat.answer(last.prompt);
}

async function clearAll() {
  if (!confirm(tr("Clear all conversations, the settings and the API key from this browser?"))) return;
  await library.clear();
  settings.takeDraft();
  settings.presets.reset();
  prompts.list.reset();
  theme.reset();
  storedKey.remove();
  forgetAll();
  at("settings").close();
  showConversations();
  announce(tr("Everything is cleared."));
}

// ---- wiring

function onClick(id, action) {
  at(id).addEventListener("click", action);
}

composer.addEventListener("send", (event) => send(event.detail));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});
onClick("stop", stop);
onClick("new-conversation", begin);
onClick("open-settings", openSettings);
onClick("reset-settings", () => settings.reset());
settings.presets.addEventListener("change", showSettings);
onClick("open-prompts", () => prompts.manage());
onClick("open-shortcuts", () => shortcuts.show());
onClick("clear-all", clearAll);
for (const button of at("examples").querySelectorAll("button")) {
  button.addEventListener("click", () => composer.send({ content: button.textContent, files: [] }));
}
at("conversation").addEventListener("click", ({ target }) => {
  const button = target.closest(".copy-code");
  if (button) copy(button.closest("figure").querySelector("code").textContent, button);
});

chat.addEventListener("change", showChat);
chat.addEventListener("saved", () => {
  showModel();
  showSettings();
  conversations.show();
});
chat.addEventListener("end", ({ detail: answers }) => {
  if (chat.turns.some((turn) => answers.includes(turn.answer))) complain(store.error ?? "");
  // Of two answers, the user first chooses one to go on with.
  composer.answerEnded(answers.length === 1 && answers[0].state === "done" && !library.opening);
});
chat.addEventListener("begin", () => {
  statuses.watch();
  meter.update();
});
chat.addEventListener("use", () => {
  second.toggle(false);
  showModel();
  announce(tr("The next message follows this answer."));
  composer.focus();
});
store.addEventListener("change", async ({ detail: ids }) => {
  if (store.error) complain(store.error);
  if (await library.takeOver(ids)) complain(tr("The conversation that was open here was deleted in another tab."));
});
for (const part of [chat, composer]) {
  part.addEventListener("announce", (event) => announce(event.detail));
  part.addEventListener("refuse", (event) => complain(event.detail));
}
server.addEventListener("change", () => {
  serverView.show();
  meter.update();
});
composer.addEventListener("change", () => meter.update());
for (const news of ["ready", "models"]) server.addEventListener(news, updateModels);
models.addEventListener("choose", () => library.goOnWith(models.name));
models.addEventListener("change", () => {
  showModel();
  settings.showDefaults(models.samplingDefaults);
  server.poll();
});
addEventListener("popstate", () => library.openAddressed());
// Before the browser breaks the stream off, which would look like a failure. Phones may tell only the second.
for (const leaving of ["beforeunload", "pagehide"]) addEventListener(leaving, () => chat.leave());

offerBottom(at("to-bottom"));
showChat();
showSettings();
document.body.inert = false; // clicks before that would be lost
goOn(takeUnsent());
if (hasKeyboard()) composer.focus();
server.poll();
await library.openAddressed(store.recover());
document.documentElement.classList.remove("is-opening");
conversations.show();
store.forgetRemoved();
