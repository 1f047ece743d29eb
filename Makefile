# make demo: asynchronous RL of a small language model, in a minute or two, no GPU needed.
# make test: the tests. Both install what they need into .venv first (make setup).

PYTHON ?= python3
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
# Compiled once here: a run starts four processes or more, and where Python may not write bytecode
# each would compile all that it imports.
INSTALL := .venv/bin/uv pip install --quiet --compile-bytecode --system-certs \
	--python .venv/bin/python -r $(REQUIREMENTS)
DEMO_FLAGS ?=

.PHONY: setup demo lint test test-faults test-runs

demo: setup
	.venv/bin/python tba.py arithmetic $(DEMO_FLAGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test: setup
	.venv/bin/python -m pytest -q -m "not faults and not runs" tests

# What kills, stops, fills up and lasts long: about a quarter of an hour.
test-faults: setup
	.venv/bin/python -m pytest -q -m faults tests

# Every preset on tiny models, the tiny tasks, the demo in bf16: about a quarter of an hour too.
test-runs: setup
	.venv/bin/python -m pytest -q -m runs tests

setup: .venv/$(REQUIREMENTS).installed

# uv does not read pip's configuration: the find-links that pip knows are passed on, so that local
# wheels are found. On a CPU, torchvision, torchaudio and torchcodec would come as CUDA builds, which
# break `import transformers`; text models need none of them. If the index offers no CPU build of
# torch, uv fetches it from PyTorch's own (--torch-backend).
.venv/$(REQUIREMENTS).installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check uv
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec > .venv/overrides.txt
	export UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$(.venv/bin/python -m pip config get global.find-links 2>/dev/null)}"; \
	$(INSTALL) --overrides .venv/overrides.txt || $(INSTALL) --overrides .venv/overrides.txt --torch-backend=cpu
else
	$(INSTALL)
endif
	touch $@
