"""Keys and values of prompts and answers that outlive the engine: the layer between it and the files of kv/disk."""
