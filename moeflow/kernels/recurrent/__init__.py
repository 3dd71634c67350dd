"""Operations of layers that keep a state of each sequence: in plain torch, and by the CPU extension."""
