"""The parts a decoder is built of. They compute; where tensors live and when a stage runs is decided elsewhere."""
