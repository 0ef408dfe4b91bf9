"""The decision, layouts, the nodes of a kernel, and the summary for the report."""
