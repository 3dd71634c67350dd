// The choice of the page's language, kept in this browser. Another one loads the page again, once no answer is written.

import { setText } from "./set_text.js";
import { Stored } from "./storage.js";
import { chooseLanguage, chosenLanguage, tr } from "./translate.js";

const unsent = new Stored("sessionStorage", "unsent"); // the message in the box when the language was chosen

/** `select` offers the languages by their codes, "" is the browser's; `hint` says that the page waits. */
export function offerLanguages(select, hint, chat, composer) {
  select.value = chosenLanguage();
  select.addEventListener("change", async () => {
    chooseLanguage(select.value);
    composer.takeBack(); // or it would be sent, and its answer would break off
    if (chat.running) setText(hint, tr("The language changes once the answer is complete."));
    while (chat.running) await new Promise((resolve) => chat.addEventListener("end", resolve, { once: true }));
    unsent.write(composer.draft);
    location.reload();
  });
}

/** The message that was in the box when the language was chosen, once; null: the page was loaded otherwise. */
export function takeUnsent() {
  const message = unsent.read();
  unsent.remove();
  return message;
}
