"""Single choices of a configuration, each with its reason: formats, memory, experts, device."""
