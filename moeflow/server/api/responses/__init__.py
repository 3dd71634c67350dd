"""OpenAI's `/v1/responses`: requests, responses, and how answers are written as items and events."""
