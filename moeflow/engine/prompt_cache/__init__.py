"""Keys and values of prompts and answers that outlive the engine: what stands between it and the files of kv/disk."""
