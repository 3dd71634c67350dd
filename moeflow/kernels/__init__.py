"""Functions on tensors, in plain torch. They know nothing of moeflow: no config, no model, no cache owner."""
