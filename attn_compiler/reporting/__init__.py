"""The output of a compilation for people and tools: the report, its words, dumps, a page, and the doctor."""
