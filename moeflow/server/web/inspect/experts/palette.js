// Colours that stay apart for colour-blind eyes.

// Seaborn's "mako": perceptually uniform, its lightness alone tells the order.
const MAKO = ["231526", "35264c", "403a75", "3d5296", "366da0", "3487a6", "35a1ab", "43bbad", "6cd3ad", "ade3c0", "def5e5"];
const NUM_STEPS = 256;
const TOPS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256]; // ends of the scale
const scale = MAKO.map((hex) => [0, 2, 4].map((at) => Number.parseInt(hex.slice(at, at + 2), 16)));
const steps = Array.from({ length: NUM_STEPS }, (_, i) => between(i / (NUM_STEPS - 1)));

/** For areas with dark text. Oklab distances are at least 0.08, also with REST and for eyes without red, green or blue
 *  cones. The contrast with ON_AREA is at least 6. */
export const AREAS = ["#7290fa", "#7bee98", "#a08dc3", "#c9a471", "#facb39", "#de7c00", "#39c3ae", "#b8b7f0"];
export const REST = "#e6e6e6";
export const ON_AREA = "#111111"; // text

function between(place) {
  const at = Math.min(scale.length - 2, Math.floor(place * (scale.length - 1)));
  const part = place * (scale.length - 1) - at;
  return scale[at].map((low, i) => Math.round(low + part * (scale[at + 1][i] - low)));
}

/** The colour of a share of the scale, 0 to 1. More stands out more from the page: brighter on a dark one. */
export const heat = (share, isDark) => `rgb(${stepOf(share, isDark).join(" ")})`;

function stepOf(share, isDark) {
  const step = Math.round(Math.min(1, Math.max(0, share)) * (NUM_STEPS - 1));
  return steps[isDark ? step : NUM_STEPS - 1 - step];
}

/** The colour of text on `heat`, dark or light, with more contrast. */
export function onHeat(share, isDark) {
  const linear = stepOf(share, isDark).map((it) => (it / 255) ** 2.2);
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.18 ? ON_AREA : "#ffffff";
}

/** The end of a scale from 0 that shows values up to this one. */
export const scaleTop = (value) => TOPS.find((top) => top >= value) ?? value;
