"""How fast a served model is, beside the roofs of the machine and beside its plan."""
