"""What all APIs of conversations share: what is asked of a model, and what its answer turns out to be."""
