"""Rewrites of other spellings of attention into plain ones, before matching."""
