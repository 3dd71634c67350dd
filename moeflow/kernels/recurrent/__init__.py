"""Operations of layers that keep a state of each sequence: in plain torch, by the CPU extension, and on a GPU."""
