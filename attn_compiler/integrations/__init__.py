"""One module for each library that has to be told in its own way. Each imports its library, and is imported by those who use it."""
