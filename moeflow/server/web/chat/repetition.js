// Notices when a text goes round in circles: the same piece again and again, up to its end.

const MAX_TAIL = 4000; // characters that are looked at
const MIN_REPEATS = 4;
const MIN_LENGTH = 160; // characters of all repeats: "ha ha ha ha" is no circle

/** Whether the text ends with the same piece at least `MIN_REPEATS` times. Lines, spaces and numbers alone may repeat. */
export function endsInCircles(text) {
  const tail = text.slice(-MAX_TAIL);
  const period = shortestPeriod([...tail].reverse());
  return period > 0 && /\p{L}/u.test([...tail].slice(-period).join(""));
}

/** The length of the shortest piece that is repeated often enough at the beginning; 0 if there is none. */
function shortestPeriod(characters) {
  // match[i]: how many characters from i on are as those from 0 on (the Z function).
  const match = new Uint32Array(characters.length);
  let [left, right] = [0, 0];
  for (let i = 1; i < characters.length; i += 1) {
    let length = i < right ? Math.min(right - i, match[i - left]) : 0;
    while (characters[length] === characters[i + length] && i + length < characters.length) length += 1;
    match[i] = length;
    if (i + length > right) [left, right] = [i, i + length];
    if (i + length >= Math.max(MIN_REPEATS * i, MIN_LENGTH)) return i;
  }
  return 0;
}
