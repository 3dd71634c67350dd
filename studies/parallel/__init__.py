"""One MoE layer on processes that exchange rows: the study of sliced experts, measured on a host's cores."""
