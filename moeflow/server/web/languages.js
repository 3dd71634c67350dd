// The page's texts in other languages, by their English. `name` is the language's own.

export const LANGUAGES = {
  de: { name: "Deutsch", texts: {} },
  fr: { name: "Français", texts: {} },
  ja: { name: "日本語", texts: {} },
  zh: { name: "中文", texts: {} },
};
