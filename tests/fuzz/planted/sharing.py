"""Faults in what ranks that share a sequence refuse. Programs of one process reach none of them: `tests/fuzz/ranks_recall.py` has these."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, file: str, within: str, old: str, new: str, why: str) -> Fault:
    return Fault(
        name=name, file=f"passes/context_parallel/{file}", within=within, old=old, new=new, rule="ranks", why=why
    )


ALL = (
    _f(
        "an op may work along the sequence",
        "ops.py",
        "_along_dim",
        "if any(has(context, place.dims[i]) for i in which):",
        "if False:",
        "a mean over the rank's own positions is taken for that over all",
    ),
    _f(
        "a slice may take some positions",
        "ops.py",
        "_slice",
        "if isinstance(found, Mixes):",
        "if isinstance(found, Mixes) and (found := place_of(context, x)) is None:",
        "the last position of a rank is not the last one",
    ),
    _f(
        "positions that are not the sequence's meet it",
        "ops.py",
        "_joined",
        "if not has(context, dim):",
        "if False:",
        "every rank counts its positions from 0",
    ),
    _f(
        "numbers are not compared with those of the whole sequence",
        "compared.py",
        "compare",
        "_check_numbers(own, other, cp.size, wholes)",
        "_check_numbers(own, own, cp.size, {**wholes, own: own})",
        "a number of the rank's length is one of the model",
    ),
    _f(
        "what was made of positions is no number of the rank",
        "following.py",
        "_counted",
        "is_counted = not held and bool(longer or counted)",
        "is_counted = False",
        "a count of the rank's positions is one of all",
    ),
    _f(
        "what is counted may be repeated",
        "following.py",
        "is_counted",
        "place.is_counted and not (place.is_uniform or place.is_repeated)",
        "False",
        "a count that meets positions is taken as it is",
    ),
    _f(
        "a table may be read by how often an index comes",
        "arguments.py",
        "unknown",
        "if not is_default and not (",
        "if False and not (",
        "an argument that counts positions is taken as it is",
    ),
    _f(
        "the whole sequence is split like a rank's",
        "ops.py",
        "_view",
        'Mixes(at=node, why="it splits the sequence") if found is None else Place(dims=found)',
        "place_of(context, views.source(node)) if found is None else Place(dims=found)",
        "rows and positions are mixed",
    ),
)
