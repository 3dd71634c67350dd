"""Anthropic's `/v1/messages`: requests, responses, and how answers are written as blocks and events."""
