"""OpenAI's `/v1/completions`: requests and responses."""
