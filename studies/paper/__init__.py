"""What MoE-Lightning published, beside what the simulator and the planner say of the same settings."""
