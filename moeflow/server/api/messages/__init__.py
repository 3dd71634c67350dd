"""Anthropic's `/v1/messages`: what it takes and gives, how answers are written as blocks and events."""
