"""One file for each family of models: how its layers are configured and its routers choose."""
