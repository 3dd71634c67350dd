// Shows a model's text: paragraphs, headings, code blocks, bold and inline code.
// The text is untrusted: every piece of it becomes a text node, nothing is ever parsed as HTML.

/** Cut text into blocks. A fence that is still open runs to the end, so a stream shows as it comes. */
export function parseBlocks(text) {
  const blocks = [];
  let code = null;
  let lines = [];
  const flush = () => {
    if (lines.length) blocks.push({ kind: "text", text: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = line.match(code ? /^\s{0,3}```+\s*$/ : /^\s{0,3}```+\s*([\w+#.-]*)[^`]*$/);
    const heading = code ? null : line.match(/^#{1,6}\s+(.+)$/);
    if (fence && code) {
      code = null;
    } else if (fence) {
      flush();
      code = { kind: "code", language: fence[1], text: "" };
      blocks.push(code);
    } else if (code) {
      code.text += `${line}\n`;
    } else if (heading) {
      flush();
      blocks.push({ kind: "heading", text: heading[1] });
    } else if (line.trim()) {
      lines.push(line);
    } else {
      flush();
    }
  }
  flush();
  return blocks;
}

/** Make `container` show `text`; blocks that did not change stay, so that a selection in them survives. */
export function renderText(container, text, { onCopy }) {
  const blocks = parseBlocks(text);
  const sources = blocks.map((block) => JSON.stringify(block));
  const old = container.renderedSources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === old[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map((block) => renderBlock(block, onCopy)));
  container.renderedSources = sources;
}

function renderBlock(block, onCopy) {
  if (block.kind === "code") return renderCode(block, onCopy);
  const element = document.createElement("p");
  if (block.kind === "heading") element.className = "heading";
  element.append(...renderInline(block.text));
  return element;
}

function renderInline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((piece) => {
    if (/^`.+`$/.test(piece)) return withText("code", piece.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(piece)) return withText("strong", piece.slice(2, -2));
    return piece;
  });
}

function renderCode({ language, text }, onCopy) {
  const figure = document.createElement("figure");
  const head = document.createElement("figcaption");
  const copy = withText("button", "Copy");
  copy.type = "button";
  copy.className = "link";
  copy.setAttribute("aria-label", "Copy code");
  copy.addEventListener("click", () => onCopy(text.trimEnd(), copy));
  head.append(withText("span", language || "code"), copy);
  const body = document.createElement("pre");
  body.tabIndex = 0; // a keyboard must be able to scroll it
  body.append(withText("code", text.trimEnd()));
  figure.append(head, body);
  return figure;
}

function withText(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}
