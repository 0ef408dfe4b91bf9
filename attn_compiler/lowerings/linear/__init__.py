"""The lowerings of linear attention. To add one: its file, and its row in `table.py`."""
