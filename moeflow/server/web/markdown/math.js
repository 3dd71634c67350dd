// Sets formulas with KaTeX, which is loaded when the first one comes. Text that is not a formula stays unchanged.

const OPTIONS = {
  throwOnError: true, // its own way of showing errors sets styles in attributes, which the page's policy forbids
  strict: "ignore",
  trust: false, // no links, no pictures, no classes or ids of the model's choice
  maxSize: 20, // em
  maxExpand: 500,
};
let katex = null;
let loading = null;

/** Make `element` show a formula (see nodes.js); returns it. */
export function showMath(element, { tex, isDisplay, isPending }) {
  element.className = `math${isDisplay ? " display" : ""}`;
  element.textContent = tex;
  element.dataset.tex = tex;
  if (isPending) return element;
  if (katex) set(element, tex, isDisplay);
  else load().then(() => element.dataset.tex === tex && set(element, tex, isDisplay), () => {}); // not loaded: see above
  return element;
}

/** Wait until formulas that were shown before are set, if that can be. */
export async function mathLoaded() {
  await loading?.catch(() => {});
}

function load() {
  loading ??= Promise.all([import("../vendor/katex/katex.js"), loadStyles()]).then(() => (katex = globalThis.katex));
  return loading;
}

function loadStyles() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("../vendor/katex/katex.css", import.meta.url);
  document.head.append(link);
  return new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", reject);
  });
}

function set(element, tex, displayMode) {
  let tree;
  try {
    tree = katex.__renderToDomTree(tex, { ...OPTIONS, displayMode });
  } catch {
    element.classList.add("wrong"); // not TeX after all, or beyond KaTeX
    return;
  }
  setStylesAside(tree);
  element.replaceChildren(tree.toNode());
  for (const styled of element.querySelectorAll("[data-style]")) {
    styled.style.cssText = styled.dataset.style;
    delete styled.dataset.style;
  }
}

/** The page's policy allows styles that scripts set as properties, but not those set as attributes. */
function setStylesAside(node) {
  if (node.attributes?.style) {
    node.attributes["data-style"] = node.attributes.style;
    delete node.attributes.style;
  }
  node.children?.forEach(setStylesAside);
}
