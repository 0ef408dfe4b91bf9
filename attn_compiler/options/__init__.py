"""Options of the user, and the key that keeps compile caches apart."""
