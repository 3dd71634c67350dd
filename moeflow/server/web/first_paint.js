// Sets the colours that the user has chosen before anything is drawn; modules run only after that. See theme.js.

try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("moeflow.theme"));
} catch {
  // Nothing can be kept here, so nothing was chosen.
}
