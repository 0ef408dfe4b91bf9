"""Functions of linear attention: proposed by their parameters, proved by their text and by running them, and taken as one node.

templates.py has a row for each way to call one. source.py and branches.py read a function's text, operations.py the ops that it is made of.
proving.py runs it against the recurrence. deciding.py says of a call whether it is taken, and substitutes.py is what Dynamo traces then.
"""
