"""OpenAI's `/v1/chat/completions`: what it takes and gives, how answers are written."""
