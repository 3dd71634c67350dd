"""Where tensors live and stages run: rooflines, what work costs, the search for the best policy. Decides only."""
