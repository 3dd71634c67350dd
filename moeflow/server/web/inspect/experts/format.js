// Numbers of experts as the user's language writes them.

import { formatNumber, formatPercent } from "../../translate.js";

/** Small shares with one digit: "3.1%", "31%". */
export const percent = (share) => formatPercent(share, share && share < 0.1 ? 1 : 0);

/** A ratio: "0.05", "1.25", "12.5", "125". */
export const ratio = (value) => formatNumber(value, value < 10 ? 2 : value < 100 ? 1 : 0);
