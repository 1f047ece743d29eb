"""The branches for a GPU, run without one: tests/pretended/."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ON_GPU, ROOT, WHOLE_RUN, python

PRETENDED = ROOT / "tests" / "pretended"
# A process in which the pretended CUDA is there before torch is.
RUN = "import cuda, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build a pretended GPU with")
@pytest.mark.skipif(ON_GPU, reason="the vLLM for GPUs is installed: make test-gpu")
def test_every_branch_for_a_gpu_works_on_a_pretended_one(tmp_path):
    torch = Path(importlib.util.find_spec("torch").origin).parent
    library = tmp_path / "gpu.so"
    build = ["g++", "-shared", "-fPIC", "-std=c++20", "-I", torch / "include"]
    build += [PRETENDED / "gpu.cpp", "-o", library, "-L", torch / "lib", "-ltorch_cpu", "-lc10"]
    subprocess.run(build, check=True, timeout=WHOLE_RUN)
    paths = os.pathsep.join(map(str, (PRETENDED, ROOT / "tests", ROOT)))
    environment = os.environ | {"PRETENDED_GPU": str(library), "PYTHONPATH": paths}
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "conftest", "-p", "cuda"]
    python("-c", RUN, *flags, *(ROOT / "tests").rglob("*_on_gpu.py"), env=environment)
