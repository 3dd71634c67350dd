"""The shell: one file a verb. Only this folder and the server read the environment."""
