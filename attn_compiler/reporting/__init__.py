"""What people and tools see of a compilation: the report, its words, dumps, a page, and the doctor."""
