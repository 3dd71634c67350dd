"""OpenAI-compatible HTTP over one engine: endpoints, guards at the door, metrics, the page, start and stop."""
