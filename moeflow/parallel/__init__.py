"""What makes one model of several processes: ranks that exchange tensors, and which of them has which experts."""
