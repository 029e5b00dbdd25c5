# make serve: a server on a small chat model. make test: everything that must hold. Both set up what they need.
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
WEBUI := .venv-webui
AGENTS := .venv-agents
CONFORMANCE := .venv-conformance
SUITES ?= openresponses langchain lm-eval vllm sglang guidellm aiperf
BIN := $(VENV)/bin
ARGS ?=
MODEL ?=
# Recipes read "$$MODEL", because make would split a path with spaces into words.
export MODEL
# The command that makes an environment. One without pip is completed: on Debian without python3-venv, venv fails and
# leaves such a one behind.
environment = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(1)

.PHONY: help install dev serve test quick lint oracle clients agents conformance sim mutants path wheel-test image-test asan test-gpu clean

help:
	@sed -n 's/^## //p' Makefile

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pequod needs Python 3.11 or newer, this is " + sys.version)'
	$(call environment,$(VENV))
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

## make install      .venv with Pequod in it (.venv/bin/pequod)
install: $(VENV)/.installed

dev: $(VENV)/.installed-dev

## make serve        a server on port 8000 with SmolLM2-135M; MODEL=... serves another; ARGS="--port 8001" passes flags on
serve: install
	@if [ -z "$$MODEL" ]; then $(BIN)/pequod pull smollm2 >/dev/null && MODEL=smollm2 || MODEL=builtin; fi; \
	exec $(BIN)/pequod serve "$$MODEL" $(ARGS)

## make test         all checks and tests
test: dev
	@$(BIN)/python -m tests.run

## make quick        the same without the slow tests
quick: dev
	@$(BIN)/python -m tests.run --quick

## make lint         ruff and mypy alone
lint: dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

## make oracle       each architecture against transformers' greedy generate, alone, batched, chunked, cached, preempted
oracle: dev
	@$(BIN)/python -m tests.oracle

# uv, because pip takes very long to find versions of these packages that go together.
$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(call environment,$(CLIENTS))
	$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check uv
	$(CLIENTS)/bin/uv pip install -q --python $(CLIENTS)/bin/python -r tests/clients/requirements.txt
	touch $@

# Without torch, which Open WebUI needs for models of its own alone. It wants a Python below 3.13: where it cannot be
# installed its column is left out.
$(WEBUI)/.installed: tests/clients/open_webui.txt | $(CLIENTS)/.installed
	-test -x $(WEBUI)/bin/python || $(PYTHON) -m venv --without-pip $(WEBUI)
	-printf torch | $(CLIENTS)/bin/uv pip install -q --python $(WEBUI)/bin/python --excludes - -r $< && touch $@

## make clients      clients that people use, each against a live server; ARGS="--json FILE" keeps every result,
##                   ARGS="--model smollm2" serves another model than the built-in one
clients: install $(CLIENTS)/.installed $(WEBUI)/.installed
	@$(CLIENTS)/bin/python -m tests.clients --python $(BIN)/python --webui $(WEBUI)/bin/open-webui $(ARGS)

$(AGENTS)/.installed: tests/agents/package.json
	mkdir -p $(AGENTS)
	cp $< $(AGENTS)/package.json
	npm install --prefix $(AGENTS) --silent --no-audit --no-fund --no-package-lock
	touch $@

## make agents       coding agents from npm against Pequod; prints the table of docs/clients.md; ARGS="--agent codex"
agents: install $(AGENTS)/.installed
	@$(BIN)/python -m tests.agents --packages $(AGENTS) $(ARGS)

UV := $(CONFORMANCE)-uv/bin/uv

$(UV): | install
	$(BIN)/python -m venv $(CONFORMANCE)-uv
	$(CONFORMANCE)-uv/bin/python -m pip install -q --disable-pip-version-check uv

# These import torch and find the one in $(VENV): lm-eval then computes with the same build as Pequod, and nobody
# downloads CUDA libraries once more. Requirements for torch are overridden by one that no Python meets.
WITH_TORCH := lm-eval vllm sglang guidellm
# Of these packages only the load client is wanted, which needs few of the packages that a server does.
ALONE_vllm := vllm==0.33.0 xgrammar
ALONE_sglang := sglang==0.5.23
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(CONFORMANCE)-%/.installed: tests/conformance/requirements/%.txt | $(UV)
	$(UV) venv -q --clear --python $(BIN)/python $(@D)
	$(if $(filter $*,$(WITH_TORCH)),$(BIN)/python -c '$(SITE)' > "$$($(@D)/bin/python -c '$(SITE)')/torch.pth")
	$(if $(ALONE_$*),$(UV) pip install -q --python $(@D)/bin/python --no-deps $(ALONE_$*))
	echo 'torch ; python_version < "3"' | $(UV) pip install -q --python $(@D)/bin/python --override /dev/stdin -r $<
	touch $@

# The suite is TypeScript; bun runs it, and comes as a package.
$(CONFORMANCE)-openresponses/.installed: tests/conformance/requirements/openresponses.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --silent --no-audit --no-fund --no-package-lock
	touch $@

# Without npm the suite says that its environment is missing.
RUNNABLE = $(if $(shell command -v npm),$(SUITES),$(filter-out openresponses,$(SUITES)))

## make conformance  other projects' test suites and load clients, each against a live server; SUITES="langchain aiperf"
conformance: install $(RUNNABLE:%=$(CONFORMANCE)-%/.installed)
	@$(BIN)/python -m tests.conformance $(SUITES:%=--suite %) $(ARGS)

## make sim          the scheduler alone, also with windows, states or both, then the whole server under faults, each for 200,000 steps
##                   one by one and 200,000 launched ahead; ARGS="--steps 2000000"
sim: dev
	@for depth in 0 1; do \
	    $(BIN)/python -m tests.simulation.scheduler --steps 200000 --seed 1 --depth $$depth $(ARGS) && \
	    $(BIN)/python -m tests.simulation.scheduler --steps 200000 --seed 1 --depth $$depth --windows $(ARGS) && \
	    $(BIN)/python -m tests.simulation.scheduler --steps 200000 --seed 1 --depth $$depth --states $(ARGS) && \
	    $(BIN)/python -m tests.simulation.scheduler --steps 200000 --seed 1 --depth $$depth --states --windows $(ARGS) && \
	    $(BIN)/python -m tests.simulation --steps 200000 --seed 1 --depth $$depth $(ARGS) || exit 1; \
	done

## make mutants      sow each fault of tests/mutants/mutants.toml into a copy; its check must catch it; ARGS="--write"
mutants: dev
	@$(BIN)/python -m tests.mutants $(ARGS)

## make path         the files to read first, in order: the engine's, then the server's
path:
	@echo engine
	@wc -l engine/types.py engine/sequence.py engine/blocks.py engine/prefix_cache.py engine/batch.py \
	  engine/scheduler.py engine/loop.py engine/client.py engine/runner/runner.py engine/runner/inputs.py engine/models/decoder.py \
	  engine/models/decoder_layer.py
	@echo server
	@wc -l server/app.py server/state.py server/http/middleware.py server/api/chat/routes.py \
	  server/api/chat/request.py server/generation/http_response.py server/generation/prepare.py server/tokenization/encoder.py \
	  server/generation/choices.py server/tokenization/detokenizer.py server/generation/output.py \
	  server/api/chat/response.py server/http/sse.py

## make wheel-test   build the wheel, install it into a fresh environment, start it from another directory
wheel-test: dev
	@$(BIN)/python -m tests.wheel

## make image-test   build the container image, run it and check it, with docker, podman or buildah; ARGS="--help"
image-test:
	@$(PYTHON) -m tests.docker.image $(ARGS)

## make asan         the CPU kernels' tests with a library built under AddressSanitizer
asan: dev
	PEQUOD_KERNEL_FLAGS="-fsanitize=address -fno-omit-frame-pointer -g1" ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so)" sh -c '\
	  $(BIN)/python -c "from engine.kernels.build import *; library(); [library(emulate=isa) for isa in EMULATED]" && \
	  $(BIN)/python -m pytest tests/engine/test_kernels.py tests/engine/test_kernels_small.py \
	    tests/engine/test_kernels_quantized.py tests/engine/test_kernels_packing.py tests/engine/test_cpu_attention.py \
	    tests/engine/test_threads.py tests/engine/test_amx.py tests/engine/test_experts.py \
	    tests/engine/test_kernels_blocks.py tests/engine/test_lossless.py tests/engine/test_logits.py \
	    tests/engine/test_delta_kernel.py tests/engine/test_mamba2_kernel.py tests/engine/test_latent.py'

## make test-gpu     the tests that need a CUDA device, eight at a time, since most of their time is a compiler's; ARGS="-k qwen3"
test-gpu: dev
	@$(BIN)/python -m pytest -m gpu tests/gpu -n 8 $(ARGS)

clean:
	rm -f engine/kernels/*.so engine/kernels/.lock
	rm -rf engine/kernels/.compiling-* $(VENV) $(CLIENTS) $(WEBUI) $(AGENTS) $(CONFORMANCE)-* build dist .pytest_cache .mypy_cache .ruff_cache
