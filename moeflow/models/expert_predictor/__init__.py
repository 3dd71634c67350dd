"""A small network that predicts which experts of all layers a token will need (SiDA's hash function)."""
