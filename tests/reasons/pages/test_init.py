"""Pages of codes: there is one for each. That its example gives the code, the tests of its module ask."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages import PAGES, SECTIONS, ExampleKind, Page, page_of

if TYPE_CHECKING:
    from collections.abc import Iterator

#: codes that no small program on a CPU meets: what it takes stands on the page
TOLD = frozenset(
    {
        # A GPU and a library.
        *(Code.NO_PLAN, Code.NOT_COMPILED, Code.CUDNN_REFUSED, Code.LIBRARY_ARGUMENTS, Code.IN_ORDER_SLOWER),
        Code.ADDED_SLOWER,
        # Several processes.
        *(Code.CONTEXT_PARALLEL_UNSUPPORTED, Code.CONTEXT_PARALLEL_INPUT),
        *(Code.SHARDED_SEQUENCE, Code.PLACEMENTS, Code.SHARDED_DROPOUT, Code.UNEQUAL_SHARES, Code.NO_LOCAL_ATTENTION),
        # A fault of ours, or of the compiler.
        *(
            Code.FAULT,
            Code.COMPILER_REFUSED,
            Code.PASS_FAILED,
            Code.COMPILE_FAILED,
            Code.KERNEL_FAILED,
            Code.VERIFY_FAILED,
        ),
        Code.VERIFICATION_MISMATCH,
        # A model that is larger than an example.
        *(Code.INSIDE_A_CALL, Code.CLOSED_TENSOR, Code.AUTOCAST_BODY),
        *(Code.PADDING_SIZES, Code.PADDING_OUT_OF_REACH),
    }
)


def _pages() -> Iterator[Page]:
    for _, pages in SECTIONS:
        yield from pages


def test_every_code_has_one_page_in_the_order_of_codes() -> None:
    assert [page.code for page in _pages()] == sorted(Code, key=str)
    assert set(PAGES) == set(Code)
    titles = [page.title for page in _pages()]
    assert len(set(titles)) == len(titles)


def test_pages_say_everything_in_sentences() -> None:
    for page in _pages():
        assert page.cause.endswith((".", "`.")), page.code
        assert page.remedy.endswith((".", "`.")), page.code
        assert not page.title.endswith("."), page.code


def test_codes_without_an_example_to_run_are_known() -> None:
    assert {page.code for page in _pages() if page.kind is ExampleKind.TOLD} == TOLD


def test_pages_come_without_torch() -> None:
    code = "import sys; import attn_compiler.reasons.pages; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_page_is_found_by_its_code_in_any_case() -> None:
    assert page_of("ac201") is PAGES[Code.DTYPE]
    assert page_of("AC999") is None
