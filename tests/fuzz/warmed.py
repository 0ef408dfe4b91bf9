"""Importing this makes a process ready for its first program. It traces and interprets as quickly as the tests do."""

from tests import quick_interpreter, quick_tracing
from tests.fuzz import preload

quick_interpreter.install()
quick_tracing.install()
preload.warm()
quick_tracing.say_nothing()
