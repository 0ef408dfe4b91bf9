"""Why something was decided, refused or missed: codes, reasons, decisions, errors, and a page for each code."""
