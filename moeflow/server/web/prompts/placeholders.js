// Placeholders in a prompt of the library: {{name}} stands for what the user fills in.

const PLACEHOLDER = /\{\{\s*([^{}]+?)\s*\}\}/g;

/** The names of the placeholders in a text, each once, in their order. */
export function placeholders(text) {
  return [...new Set([...text.matchAll(PLACEHOLDER)].map(([, name]) => name))];
}

/** The text with values, by name, in the place of placeholders. */
export function filled(text, values) {
  return text.replaceAll(PLACEHOLDER, (whole, name) => values.get(name) ?? whole);
}
