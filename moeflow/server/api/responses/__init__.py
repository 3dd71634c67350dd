"""OpenAI's `/v1/responses`: what it takes and gives, how answers are written as items and events."""
