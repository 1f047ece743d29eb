# make demo: asynchronous RL of a small language model, in one to three minutes, no GPU needed.
# make demo-smollm: the same of a real one, SmolLM2-135M-Instruct, in about ten minutes.
# make test: the tests. All install what they need into .venv first (make setup).

PYTHON ?= python3
GPU := $(shell nvidia-smi -L 2>/dev/null)
INSTALLED := .venv/$(if $(GPU),gpu,cpu).installed
# vLLM's build for GPUs finds them however they are hidden: the tests have the CPU build, in an
# environment of its own where the first has the other.
TEST_VENV := $(if $(GPU),.venv-cpu,.venv)
DEMO_FLAGS ?=
TESTS ?= tests

PYTEST := $(TEST_VENV)/bin/python -m pytest -q --durations=10
# Of tests that are long and often wait: three workers for two cores, and one that has none left
# takes over another's.
PYTEST_LONG := $(PYTEST) -n 3 --dist worksteal
SUITES := test test-faults test-runs test-cluster

.PHONY: setup setup-tests demo demo-smollm lint $(SUITES) test-all test-gpu mutants

demo: setup
	.venv/bin/python tba.py arithmetic $(DEMO_FLAGS)

demo-smollm: setup .venv/smollm.installed
	.venv/bin/python tba.py sums $(DEMO_FLAGS)

lint: setup-tests
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .

test: setup-tests
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not faults and not runs and not cluster" $(TESTS)

# What kills, stops, fills up and lasts long.
test-faults: setup-tests
	$(PYTEST_LONG) -m faults tests

# Every preset on tiny models, the tiny tasks, trackers, the demo in bf16.
test-runs: setup-tests $(TEST_VENV)/smollm.installed
	$(PYTEST_LONG) -m runs tests

# Searchers on further nodes of a Ray cluster, in a network that has nothing but this machine. One
# test at a time: two clusters are too many for two cores.
test-cluster: setup-tests $(TEST_VENV)/ray.installed
	unshare $(if $(filter-out 0,$(shell id -u)),--map-root-user) --net sh -c \
	  'ip link set lo up && exec "$$@"' sh $(PYTEST) -m cluster tests

# The four, one after the other; then a line for each.
test-all:
	@for suite in $(SUITES); do \
	  start=$$(date +%s); how=passed; \
	  $(MAKE) --no-print-directory $$suite || how=FAILED; \
	  lines="$$lines$$suite $$how in $$(($$(date +%s) - start)) s\n"; \
	done; printf "$$lines"; case "$$lines" in *FAILED*) exit 1;; esac

# Which faults, planted in the core one at a time, do its tests find?
mutants: setup-tests $(TEST_VENV)/mutants.installed
	$(TEST_VENV)/bin/python tests/mutants.py

# What wants a GPU, with the vLLM for GPUs; without one each test is skipped, with the reason.
test-gpu: setup
	.venv/bin/python -m pytest -q -rs -m gpu tests

setup: $(INSTALLED)

setup-tests: $(patsubst %,$(TEST_VENV)/%.installed,lora track gym)

.venv/smollm.installed: | $(INSTALLED)
$(TEST_VENV)/smollm.installed: | $(TEST_VENV)/cpu.installed
.venv/smollm.installed .venv-cpu/smollm.installed: requirements/smollm.txt
	$(say)
	@$(uv_install) --no-deps
	@touch $@

# What is optional, for the tests.
OPTIONAL := $(patsubst %,$(TEST_VENV)/%.installed,lora ray track gym mutants)
$(OPTIONAL): $(TEST_VENV)/%.installed: requirements/%.txt $(TEST_VENV)/cpu.installed
	$(say)
	@$(uv_install)
	@touch $@

.venv/gpu.installed: requirements.txt
	$(install)

.venv/cpu.installed .venv-cpu/cpu.installed: requirements/cpu.txt
	$(install)

# vLLM compiles kernels when it starts, and the index has torch for CUDA 13. What nvidia-smi says is
# that of the driver, or of NVIDIA's cuda-compat package where that is on LD_LIBRARY_PATH.
define check_gpu
	@lacks=""; cuda=$$(nvidia-smi | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\).*/\1/p' | head -n 1); \
	[ "$${cuda:-0}" -ge 13 ] || lacks="$$lacks, a driver for CUDA 13, 580 or newer (this one is for CUDA $$cuda)"; \
	command -v gcc >/dev/null || lacks="$$lacks, gcc"; \
	[ -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] || lacks="$$lacks, the headers of Python (python3-dev)"; \
	[ -z "$$lacks" ] || { echo "this machine lacks$${lacks#,}: see Platform in docs/operations.md"; exit 1; }
endef

# Into the directory of the target, what the file that it is named after asks for.
# Bytecode is compiled once here: a run starts four processes or more, and where Python may not write
# it each would compile all that it imports.
# uv does not read pip's configuration: the find-links that pip knows are passed on, so that local
# wheels are found. On a CPU, torchvision, torchaudio and torchcodec would come as CUDA builds, which
# break `import transformers`; text models need none of them. If the index offers no CPU build of
# torch, uv fetches it from PyTorch's own (--torch-backend). pip is asked to be quiet twice: once, it
# still warns of each index that has no uv. uv shows on a terminal how far it is.
define install
	$(if $(findstring cpu,$<),,$(check_gpu))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 1; }
	$(say)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check uv
	@printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec > $(@D)/overrides.txt
	@$(if $(findstring cpu,$<),cpu="--overrides $(@D)/overrides.txt"; $(uv_install) $$cpu || $(uv_install) $$cpu --torch-backend=cpu,$(uv_install))
	@touch $@
endef

say = @echo "installing what $< asks for into $(@D)"
uv_install = UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(@D)/bin/python -m pip config get global.find-links 2>/dev/null)}" \
	$(@D)/bin/uv pip install $$([ -t 2 ] || echo --quiet) --compile-bytecode --system-certs --python $(@D)/bin/python -r $<
