"""Which lowering comes first, from measured data."""
