"""Other engines measured beside ours: the same model, the same work, in turns. Heavy; no part of the tests."""
