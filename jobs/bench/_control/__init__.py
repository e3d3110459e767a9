"""A simulated fleet under a trace of faults, decided by the policies and laid out by the planner: no processes."""
