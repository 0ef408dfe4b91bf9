"""Processes for tests: real ones, and forks of one that has imported torch, which start in milliseconds rather than in seconds.

A fork is as fresh as a process just after `import torch` and Dynamo's, AOTAutograd's and Inductor's own modules: nothing was compiled in
it, this package and transformers are not imported, there is one thread. It compiles as quickly as tests do. What it has from the process
that it is a fork of: the variables that are read at import (`run` refuses others), the seed of Python's hashes, addresses, `sys.path`, and
which instructions the C++ compiler knows. Forks of different servers (`of`) have other hashes and addresses, as two processes do. A test
of importing takes a real process.

Where there is CUDA, every process is a real one: CUDA can't be used in a fork of a process that looked for devices.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]

#: a server whose forks compile Triton's kernels: they do not have TRITON_INTERPRET, and have imported less
KERNELS = "kernels"
#: what a fork has imported
IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "torch._dynamo.backends.debugging", "torch.utils.checkpoint")
#: a server whose forks run models of transformers
MODELS = "models"
_IMPORTED_FOR_MODELS = (*IMPORTED, "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
_IMPORTED_FOR_KERNELS = (
    "torch.fx.experimental.symbolic_shapes",
    "triton.backends.nvidia.compiler",
    "triton.experimental.gluon.language",
)
#: variables that are read when something is compiled or printed, so that a fork can have others than this process, and CUDA's own
LATE = frozenset({"ATTN_COMPILER_CACHE_REWRITES", "COLUMNS", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR"})

#: as they were when tests were collected: what a test changes for itself does not reach a fork by itself
_VARIABLES = dict(os.environ)

Done = subprocess.CompletedProcess


def run(
    code: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    of: str = "torch",
    check: bool = True,
) -> Done[str]:
    """`python -c CODE ARGUMENTS` in a fork. environment: what differs from what all tests have. of: the name of a server; one of a new
    name starts. check: an exit status other than 0 is an error."""
    if torch.cuda.is_available():
        return run_anew(code, *arguments, environment=environment, cwd=cwd, of=of, check=check)
    return _checked(_server(of).run(code, arguments, environment or {}, cwd), check)


def run_anew(
    code: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    of: str = "torch",
    check: bool = True,
) -> Done[str]:
    """The same in a real process, with any environment."""
    command = [sys.executable, "-c", code, *arguments]
    variables = {**_variables(of), **(environment or {})}
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, check=False)
    return _checked(done, check)


def _variables(of: str) -> dict[str, str]:
    return {name: value for name, value in _VARIABLES.items() if of != KERNELS or name != "TRITON_INTERPRET"}


def _checked(done: Done[str], check: bool) -> Done[str]:
    if check and done.returncode != 0:
        raise AssertionError(f"it ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done


@functools.cache
def _server(name: str) -> _Server:
    """One of a name in a test process. It ends before this process does."""
    imported = {KERNELS: _IMPORTED_FOR_KERNELS, MODELS: _IMPORTED_FOR_MODELS}.get(name, IMPORTED)
    server = _Server(_variables(name), imported)
    atexit.register(server.close)
    return server


class _Server:
    """It may be asked from several threads at once."""

    def __init__(self, variables: dict[str, str], imported: Sequence[str]) -> None:
        self._variables = variables
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending = threading.Lock()
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *imported]
        self._process = subprocess.Popen(command, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def run(self, code: str, arguments: Sequence[str], changes: Mapping[str, str], cwd: Path) -> Done[str]:
        early = {name for name, value in changes.items() if self._variables.get(name) != value} - LATE
        if early:
            raise ValueError(f"torch may have read {sorted(early)} when it was imported: start a real process")
        request = {
            "code": code,
            "arguments": list(arguments),
            "environment": {**self._variables, **changes},
            "cwd": str(cwd),
        }
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, ours:
            with self._sending, theirs:
                files = [output.fileno(), errors.fileno(), theirs.fileno()]
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            status = ours.recv(16)
            said = [_all_of(file.fileno()) for file in (output, errors)]
        if not status:
            raise RuntimeError(f"the server of forks is gone; it ended with {self._process.poll()}")
        return Done([code, *arguments], int(status), *said)


def _all_of(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file)) as reader:
        return reader.read()
