"""Functions of linear attention: proposed by their parameters, proved by their text and by runs, and taken as one node.

templates.py has one row for each list of parameters, and looking.py finds functions that have them.
source.py and branches.py read a function's text; operations.py reads its ops.
proving.py runs it against the recurrence. deciding.py decides if a call is taken. substitutes.py holds the code that Dynamo traces instead.
"""
