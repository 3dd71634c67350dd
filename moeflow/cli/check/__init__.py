"""`moeflow check`: whether a server conforms to the APIs of OpenAI and Anthropic."""
