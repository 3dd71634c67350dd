"""What runs tasks: futures, lanes, the executor, and the trace of what they did."""
