"""A process that has imported torch and did nothing with it. Each request that comes over its socket is run in a fork of it.

`python -m tests.fork_server FD MODULE...`: FD is a Unix socket, the modules are imported first. It ends when the other end is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import traceback
import types
from typing import Any

from tests import quick

#: bytes of a request: code, arguments and environment
LARGEST = 1 << 20


def serve(requests: socket.socket) -> None:
    """A message and three files a request: where its output and its errors go, and the socket that its exit status is told on."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not message:
            _bury(wait=True)
            return
        # The first fork waits for the second, so that this process can listen to who asks next.
        if os.fork() == 0:
            requests.close()
            _watch(json.loads(message), *files)
        for file in files:
            os.close(file)
        _bury()


def _bury(*, wait: bool = False) -> None:
    """Forks that are over leave nothing behind."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if wait else os.WNOHANG)[0]:
            pass


def _watch(request: dict[str, Any], output: int, errors: int, status: int) -> None:
    child = os.fork()
    if child == 0:
        os.close(status)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os._exit(_run(request))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, str(code).encode())
    os._exit(0)


def _run(request: dict[str, Any]) -> int:
    """As `python -c CODE ARGUMENTS` would: the code is `__main__`, and what is registered for the end of a process is called."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["-c", *request["arguments"]]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _exit_code(given: object) -> int:
    if given is None or isinstance(given, int):
        return given or 0
    sys.stderr.write(f"{given}\n")
    return 1


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Of several threads, a fork would have one.
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing {sys.argv[2:]} started {len(threads) - 1} threads")
    if "torch._inductor.cpu_vec_isa" in sys.modules:
        # Else each fork with an empty cache would compile a dozen programs to find out.
        sys.modules["torch._inductor.cpu_vec_isa"].pick_vec_isa()
    if "torch._dynamo" in sys.modules:
        quick.install()
        quick.install_in_imported()
    # What is imported lasts, as in tests/conftest.py.
    gc.set_threshold(200_000, 10, 20)
    gc.collect()
    gc.freeze()
    # Forks have it as well.
    quick.call(serve, requests)


if __name__ == "__main__":
    main()
