"""Numbers of MoE-Lightning's figures for any machine and model; drawn elsewhere."""
