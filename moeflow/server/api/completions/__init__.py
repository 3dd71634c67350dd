"""OpenAI's `/v1/completions`: what it takes and gives."""
