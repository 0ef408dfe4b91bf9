"""Sessions outside CI's default path: the public API on every torch that we support, and models of other releases of transformers.

nox                              the public API and the passes on every torch, and models of two releases of transformers
nox -s docs                      the site, strictly, into build/site; after -- what mkdocs is to do: nox -s docs -- serve
nox -s "api(2.11.0)"             one torch; arguments after -- go to pytest
nox -s "transformers(4.57)"      one transformers
nox -s slow                      tests that are too long for CI, once a night
nox -s room -- passes/recovering lint, types, the tests of a room and of the rooms that import it, in the active environment
nox -s triton                    all kernels, compiled by every release of Triton; after --: --write keeps the rows
"""

from __future__ import annotations

import nox

# Fresh environments of their own: the pinned versions of constraints.txt are for one torch only.
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["api", "transformers"]

TORCHES = {
    "2.11.0": "torch==2.11.0",
    "2.13.0": "torch==2.13.0",
    "2.14.1": "torch==2.14.1",
    "newest": "torch>=2.15,<2.16",
}

# What tests put into PyTorch to be quick is left out: what runs is what users run (tests/quick.py).
AS_IT_IS = {"TESTS_QUICK": "0"}

# What a user calls: the entry point, its options, reports and errors.
PUBLIC_API = (
    "tests/test_always_runs.py",
    "tests/compiling/test_backend.py",
    "tests/test_cache_safety.py",
    "tests/reporting/test_doctor.py",
    "tests/reasons/test_errors.py",
    "tests/compiling/test_explaining.py",
    "tests/test_init.py",
    "tests/options/test_options.py",
    "tests/compiling/test_registration.py",
    "tests/reporting/test_columns.py",
    "tests/reporting/test_report.py",
    "tests/torch_private/test_compat.py",
    "tests/torch_private/test_op_library.py",
    "tests/torch_private/test_store.py",
)


@nox.session
@nox.parametrize("torch", list(TORCHES), ids=list(TORCHES))
def api(session: nox.Session, torch: str) -> None:
    """The tests of the public API and of the passes on one version of torch."""
    # torch on its own first, so that no other package's wish picks its version.
    session.install(TORCHES[torch])
    session.install("-e", ".[models]", "pytest", "pytest-xdist", "hypothesis")
    session.run("python", "-c", "import torch; print(torch.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or (*PUBLIC_API, "tests/passes")), env=AS_IT_IS)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, where any link that leads nowhere is an error; or serve it."""
    session.install("-c", "constraints.txt", "-e", ".[docs]")
    session.run("python", "-m", "mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"})


#: 4.57 is outside of the extra `models`: it is what docs/supported.md says of it, and no more.
TRANSFORMERS = {"4.57": "transformers>=4.57,<4.58", "newest": "transformers>=5.17,<6"}


@nox.session
@nox.parametrize("transformers", list(TRANSFORMERS), ids=list(TRANSFORMERS))
def transformers(session: nox.Session, transformers: str) -> None:
    """The public API, and the survey's padded batches, with one release of transformers on the torch of constraints.txt."""
    session.install("-c", "constraints.txt", "torch")
    session.install("-e", ".", TRANSFORMERS[transformers], "pytest", "pytest-xdist", "hypothesis", "triton")
    session.run("python", "-c", "import torch, transformers; print(torch.__version__, transformers.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or PUBLIC_API))
    if not session.posargs:
        session.run("python", "-m", "tests.hf", "--only", "padded", "--only", "fp32")


@nox.session
def slow(session: nox.Session) -> None:
    """What CI leaves out: tests longer than a minute, every way of sharing a sequence, every family of models and of decoding."""
    session.install("-c", "constraints.txt", "torch")
    session.install("-c", "constraints.txt", "-e", ".[models,demo,integrations,dev]")
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2", "-m", "slow or survey")))


@nox.session(venv_backend="none")
def room(session: nox.Session) -> None:
    """The loop of a day: what has to hold after a change of one room, with the tools of the active environment."""
    if not session.posargs:
        session.error("name a folder of attn_compiler/: nox -s room -- passes/recovering")
    folder, *more = session.posargs
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    tests = session.run("python", "-m", "tests.imports", folder, silent=True)
    always = ("tests/test_layout.py", "tests/test_mirror.py")
    session.run("python", "-m", "pytest", "-q", "-n", "2", *str(tests).split(), *always, *more)


@nox.session
def triton(session: nox.Session) -> None:
    """Every case of every family, compiled by each release of Triton that it is known with. No GPU is needed; CI has a cross-section."""
    session.install("-c", "constraints.txt", "torch")
    session.install("-c", "constraints.txt", "-e", ".", "triton", "pytest", "hypothesis")
    session.run("python", "-m", "benchmarks.triton_releases", "--all", *session.posargs)
