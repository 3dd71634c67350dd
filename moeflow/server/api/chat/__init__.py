"""OpenAI's `/v1/chat/completions`: requests, responses, and how answers are written."""
