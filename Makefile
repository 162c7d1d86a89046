# `make demo` and `make test` set up all they need: a virtual environment in .venv, with the tested versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDA12 := $(VENV)/.cuda12
CUDA13 := build/cuda13

.PHONY: demo test test-cuda13 lint clean

demo: $(STAMP)
	$(BIN)/pagewire generate 'The "with" statement is used to' --max-tokens 120

test: $(STAMP) $(CUDA12)
	$(BIN)/pytest

# The CUDA kernels' compiler: tests compile them, though they need no GPU.
$(CUDA12): $(STAMP)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev,cuda12]'
	@touch $@

# CuPy is installed for one CUDA only: that for 13 lies in a folder of its own.
test-cuda13: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(CUDA13) -c constraints.txt \
		cupy-cuda13x cuda-pathfinder cuda-toolkit==13.0.* nvidia-cuda-nvrtc==13.0.* nvidia-cuda-runtime==13.0.*
	PYTHONPATH=$(CUDA13) LD_LIBRARY_PATH=$(CUDA13)/nvidia/cu13/lib PAGEWIRE_TEST_NVRTC=13.0 \
		$(BIN)/pytest tests/kernels/cuda/test_compile.py

# mypy sees the namespace through links: the folders sit side by side, pagewire.* is made on installation.
FOLDERS := cli engine_core frontend ipc kernels workers
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/types/pagewire
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/types/pagewire/$$folder; done
	@for file in __init__.py py.typed demo; do ln -sfn ../../../pagewire/$$file build/types/pagewire/$$file; done
	$(BIN)/mypy -p pagewire

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
