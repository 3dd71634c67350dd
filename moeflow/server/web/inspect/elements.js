// Builds elements of views.

/** An element with properties of its DOM object, attributes (names with a dash, and `role`), and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A group of radio buttons in one row. `options` are [value, text]; `onChoose(value)` is called at each choice. */
export function choice(name, legend, options, onChoose) {
  const group = make("fieldset", { className: "choice" }, make("legend", { className: "unseen", textContent: legend }));
  for (const [value, text] of options) {
    const input = make("input", { type: "radio", name, value, checked: value === options[0][0] });
    input.addEventListener("change", () => onChoose(value));
    group.append(make("label", {}, input, make("span", { textContent: text })));
  }
  return group;
}
