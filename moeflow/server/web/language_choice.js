// The choice of the page's language, kept in this browser. Another one loads the page again.

import { chooseLanguage, chosenLanguage } from "./translate.js";

/** `select` offers the languages by their codes; "" is the browser's. */
export function offerLanguages(select) {
  select.value = chosenLanguage();
  select.addEventListener("change", () => {
    chooseLanguage(select.value);
    location.reload();
  });
}
