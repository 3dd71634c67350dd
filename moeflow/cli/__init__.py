"""The shell: one file a verb. The only floor, with the server, that reads the environment."""
