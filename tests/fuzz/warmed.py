"""Importing this makes a process ready for its first program. It traces and interprets as quickly as the tests do."""

from tests import quick
from tests.fuzz import preload

quick.install(interpreter=True)
preload.warm()
quick.install_in_imported()
