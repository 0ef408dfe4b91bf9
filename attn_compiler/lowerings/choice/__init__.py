"""The order in which lowerings are asked, from measured data."""
