"""Published results of the four papers, beside predictions and measurements of the same settings."""
