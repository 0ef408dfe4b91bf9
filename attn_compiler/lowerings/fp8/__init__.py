"""The floor of FP8: how q, k and v are rounded, and how a gradient comes to what is computed of them. The lowerings are their families'."""
