// Stylesheets of parts that are loaded when they are first used.

const added = new Map(); // promises, by address

/** Add a stylesheet, next to the module with the address `base`: addStyles("./prompts.css", import.meta.url). The promise
 *  is kept once it holds, or cannot be loaded: the part works without it. */
export function addStyles(name, base) {
  const { href } = new URL(name, base);
  if (!added.has(href)) added.set(href, load(href));
  return added.get(href);
}

function load(href) {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = href;
  document.head.append(link);
  return new Promise((resolve) => {
    for (const event of ["load", "error"]) link.addEventListener(event, resolve);
  });
}
