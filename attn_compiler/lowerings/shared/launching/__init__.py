"""How a kernel is compiled, launched and launched again, whatever it computes."""
