// The values of settings, and the fields of a request that they become. A preset has one for every setting.

import { tr } from "../translate.js";

const MAX_STOP_STRINGS = 16; // of the server
const NUM_ALTERNATIVES = 5; // to each token, that one among them as a rule
export const DEFAULTS = Object.freeze({
  system: "",
  temperature: null, // null: the server's default for the model
  top_p: null,
  top_k: null,
  min_p: null,
  repetition_penalty: null,
  max_tokens: 1024,
  seed: null,
  stop_strings: "", // one string a line
  json_schema: "",
  token_trees: false, // show drafts
  token_probabilities: false,
});
/** Why the text of a field is not a value, or "", by the field's name. */
export const PROBLEMS = { stop_strings: stopProblem, json_schema: schemaProblem };

/** A value for each known setting. By name, because another version of the page may have kept other settings. */
export function wholeValues(kept) {
  const values = { ...DEFAULTS, ...kept };
  return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, values[name]]));
}

/** Only the values that are not the defaults. */
export function changedValues(values) {
  return Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== DEFAULTS[name]));
}

/** The fields of a chat completion request that are set. `hasDrafts`: the server drafts tokens. */
export function samplingFields(values, { hasDrafts }) {
  const { system, token_trees, token_probabilities, stop_strings, json_schema, ...numbers } = values;
  const sampling = Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null));
  const stops = stopStrings(stop_strings);
  if (stops.length) sampling.stop = stops;
  if (json_schema.trim()) sampling.response_format = schemaFormat(json_schema);
  if (token_probabilities) Object.assign(sampling, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (hasDrafts && token_trees) sampling.token_trees = true;
  return sampling;
}

/** The changed values in words: ["Temperature 0.2", "Own system prompt"]. */
export function describeValues(changed) {
  const words = {
    system: () => (changed.system ? tr("Own system prompt") : tr("No system prompt")),
    temperature: (value) => tr("Temperature {value}", { value }),
    top_p: (value) => tr("Top-p {value}", { value }),
    top_k: (value) => tr("Top-k {value}", { value }),
    min_p: (value) => tr("Min-p {value}", { value }),
    repetition_penalty: (value) => tr("Repetition penalty {value}", { value }),
    max_tokens: (value) => (value === null ? tr("No limit of tokens") : tr("Max tokens {value}", { value })),
    seed: (value) => tr("Seed {value}", { value }),
    stop_strings: () => tr("Stop strings"),
    json_schema: () => tr("JSON schema"),
    token_trees: () => tr("Drafts shown"),
    token_probabilities: () => tr("Token probabilities kept"),
  };
  return Object.keys(words).filter((name) => name in changed).map((name) => words[name](changed[name]));
}

function stopStrings(text) {
  return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
}

function stopProblem(text) {
  return stopStrings(text).length > MAX_STOP_STRINGS ? tr("At most {max} stop strings.", { max: MAX_STOP_STRINGS }) : "";
}

function schemaFormat(text) {
  return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } };
}

function schemaProblem(text) {
  if (!text.trim()) return "";
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? "" : tr("A schema is a JSON object: { … }.");
  } catch (error) {
    return tr("This is not JSON: {reason}.", { reason: error.message });
  }
}
