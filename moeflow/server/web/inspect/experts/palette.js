// Colours that stay apart for colour-blind eyes.

const VIRIDIS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"];
const NUM_STEPS = 256;
const TOPS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256]; // ends of the scale
const scale = VIRIDIS.map((hex) => [0, 2, 4].map((at) => Number.parseInt(hex.slice(at, at + 2), 16)));
const steps = Array.from({ length: NUM_STEPS }, (_, i) => between(i / (NUM_STEPS - 1)));

/** Paul Tol's light scheme: for areas with dark text, apart from each other for all eyes. The last is for all others. */
export const AREAS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"];
export const REST = "#dddddd";
export const ON_AREA = "#111111"; // text

function between(place) {
  const at = Math.min(scale.length - 2, Math.floor(place * (scale.length - 1)));
  const part = place * (scale.length - 1) - at;
  return scale[at].map((low, i) => Math.round(low + part * (scale[at + 1][i] - low)));
}

/** The colour of a share of the scale, 0 to 1. More stands out more from the page: brighter on a dark one. */
export function heat(share, isDark) {
  const step = Math.round(Math.min(1, Math.max(0, share)) * (NUM_STEPS - 1));
  return `rgb(${steps[isDark ? step : NUM_STEPS - 1 - step].join(" ")})`;
}

/** The colour of text on `heat`: dark or light, whichever has more contrast. */
export function onHeat(share, isDark) {
  const step = Math.round(Math.min(1, Math.max(0, share)) * (NUM_STEPS - 1));
  const linear = steps[isDark ? step : NUM_STEPS - 1 - step].map((it) => (it / 255) ** 2.2);
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.18 ? ON_AREA : "#ffffff";
}

/** The end of a scale from 0 that shows values up to this one. */
export const scaleTop = (value) => TOPS.find((top) => top >= value) ?? value;
