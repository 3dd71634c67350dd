// Pictures on a <canvas>: sharp on every screen and in the colours of the page. A new size or theme redraws them.

const root = document.documentElement;
const plots = []; // all of the page, which keeps its views: they are drawn anew when its colours change

/** A canvas and its picture. The size is that of the element in the layout, so set it by CSS, or by `setSize`. */
export class Plot {
  /** `draw(pen, { width, height })` draws the picture with a CanvasRenderingContext2D, in CSS pixels. */
  constructor(canvas, draw) {
    Object.assign(this, { canvas, draw });
    this.frame = null; // of the redraw that is asked for
    new ResizeObserver(() => this.drawNow()).observe(canvas);
    plots.push(this);
  }

  /** The size in CSS pixels. */
  get size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  setSize(width, height) {
    setStyles(this.canvas, { width: `${width}px`, height: `${height}px` });
  }

  /** Draw before the next frame, however often this is called until then. */
  redraw() {
    this.frame ??= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { width, height } = this.size;
    if (!width || !height) return; // it is not shown
    const density = window.devicePixelRatio;
    this.canvas.width = Math.round(width * density); // this clears it
    this.canvas.height = Math.round(height * density);
    const pen = this.canvas.getContext("2d");
    pen.scale(density, density);
    this.draw(pen, { width, height });
  }
}

/** Set CSS properties of an element; the page's policy forbids style attributes. Names are those of CSS. */
export function setStyles(element, styles) {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
}

/** The page's colours as canvases know them: colours(canvas, "text", "line") -> { text: "rgb(…)", line: "rgb(…)" }.
 *  The names are those of style.css without dashes. They hold until the theme changes, so ask in `draw`. */
export function colours(element, ...names) {
  const probe = element.parentElement.appendChild(document.createElement("i"));
  const read = (name) => {
    probe.style.setProperty("color", `var(--${name})`);
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(names.map((name) => [name, read(name)]));
  probe.remove();
  return found;
}

/** Whether the page is dark now, where an element is. */
export function isDark(element) {
  const [red, green, blue] = colours(element, "ground").ground.match(/[\d.]+/g).map(Number);
  return red + green + blue < 3 * 128;
}

/** Round numbers from `low` to `high`, about so many: ticks(0, 7.3, 4) -> [0, 2, 4, 6] */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((it) => it * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function redrawAll() {
  for (const plot of plots) plot.drawNow();
}

new MutationObserver(redrawAll).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
for (const query of ["(prefers-color-scheme: dark)", "print", "(forced-colors: active)"]) {
  matchMedia(query).addEventListener("change", redrawAll);
}
