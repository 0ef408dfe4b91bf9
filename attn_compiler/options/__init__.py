"""What a user may ask for, and the key that keeps compile caches apart."""
