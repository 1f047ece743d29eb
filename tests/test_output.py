"""What a run says may be lost, but it does not end the run."""

import subprocess
import sys

import pytest
from conftest import ROOT

TALKS = r"""
import sys
from runtime.child import tolerate_failed_prints
tolerate_failed_prints()
for stream in (sys.stdout, sys.stderr):
    print("π" * 100_000, file=stream)
    print("a file's name that is no UTF-8: \udcff", file=stream, flush=True)
"""


@pytest.mark.parametrize("where", ["", "> /dev/full 2> /dev/full", ">&- 2>&-"])
def test_a_print_that_cannot_be_written_raises_nowhere_and_what_has_no_code_is_escaped(where):
    command = ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, "-c", TALKS]
    environment = {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    whole = "\\u03c0" * 100_000 + "\na file's name that is no UTF-8: \\udcff\n"
    expected = "" if where else whole
    assert (result.returncode, result.stdout, result.stderr) == (0, expected, expected)
