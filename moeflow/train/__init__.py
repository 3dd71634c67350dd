"""Makes models and learns about them: upcycling, routers, perplexity, the built-in model."""
