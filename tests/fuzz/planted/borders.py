"""Faults in what is known of a mask that another graph made."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, within: str, old: str, new: str, why: str) -> Fault:
    return Fault(
        name=name, file="torch_private/meanings.py", within=within, old=old, new=new, rule="masks known", why=why
    )


ALL = (
    _f(
        "writes to a known mask are not looked for",
        "is_of",
        "            and (not self.watched or torch_writes.is_unwritten(tensor))\n",
        "",
        "it means what it meant before the write",
    ),
    _f(
        "a known mask may lie in other strides",
        "is_of",
        "            and self.strides == tensor.stride()\n",
        "",
        "transposed, it means what it did",
    ),
    _f(
        "a known mask may lie somewhere else",
        "is_of",
        "            and (not self.watched or torch_writes.is_unwritten(tensor))\n            and self.writes == tensor._version\n"
        "            and self.address == torch_writes.address(tensor)\n",
        "",
        "other data means what the first did",
    ),
    _f(
        "who reads a mask makes it known again",
        "_begin_to_read",
        "tensor is not None and entry.is_of(tensor)",
        "tensor is not None",
        "a written mask means what it did, from the second graph on",
    ),
)
