"""Which nodes are an attention, and what only looks like one."""
