"""What masks and score changes mean, and the spec that follows."""
