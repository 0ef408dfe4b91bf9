"""A report as one HTML page, for `Report.save` and `Reports.save`: pure functions from data to text.

document.py: the whole page, with page.css. graphs.py, sites.py: its sections and cards. diffs.py: the dump's diff of each pass. grid.py: a
mask's data, by examples.py and conditions.py; drawing.py: that as SVG. markup.py: HTML with escaping.
"""

from attn_compiler.reporting.page.document import page

__all__ = ["page"]
