"""What a run says may be lost, but it does not end the run."""

import subprocess
import sys

import pytest
from conftest import ROOT

TALKS = r"""
import sys
from runtime.output import tolerate_failed_prints
tolerate_failed_prints()
for stream in (sys.stdout, sys.stderr):
    print("π" * 100_000, file=stream)
    print("a file's name that is no UTF-8: \udcff", file=stream, flush=True)
"""


@pytest.mark.parametrize("where", ["> /dev/full 2> /dev/full", ">&- 2>&-"])
def test_a_print_that_cannot_be_written_or_encoded_raises_nowhere(where):
    command = f'exec "$@" {where}'
    command = ["sh", "-c", command, "sh", sys.executable, "-c", TALKS]
    environment = {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


def test_what_can_be_written_arrives_and_letters_that_the_stream_lacks_are_escaped():
    command, environment = [sys.executable, "-c", TALKS], {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout == result.stderr
    assert result.stdout == "\\u03c0" * 100_000 + "\na file's name that is no UTF-8: \\udcff\n"
