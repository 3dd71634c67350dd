"""Other engines measured beside ours: the same model, the same work, alternately. Heavy; no part of the tests."""
