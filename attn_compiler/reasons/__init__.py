"""Reasons of decisions and refusals: codes, reasons, decisions, errors, and a page for each code."""
