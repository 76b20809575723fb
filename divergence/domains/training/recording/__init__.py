"""A training step, recorded: what it is asked, forward and backward, the optimizer."""
