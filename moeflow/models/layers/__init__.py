"""What the families are built from: attention, experts, decoder layers. They compute and nothing else."""
