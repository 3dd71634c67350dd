"""The endpoints: what may be asked and how it is answered, one pair of files an endpoint."""
