"""What drafting tokens brings: five sets of prompts, with speculators and without."""
