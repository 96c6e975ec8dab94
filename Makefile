SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := $(CURDIR)/.venv
# What the pipeline's `python` and the notebooks' kernels are, activated or not.
export PATH := $(VENV)/bin:$(PATH)
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false
INSTALLED := .venv/.installed

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info < (3, 12))' || { \
		echo "error: $(PYTHON) is $$($(PYTHON) --version); the pinned packages need 3.11.5 or a later 3.11:" \
			"give one with make PYTHON=..." >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned packages into .venv (about 2 GB, minutes)"
	.venv/bin/python -m pip install --no-compile -r requirements.lock
	.venv/bin/python -m pip install --no-deps --editable .
	touch $@

.PHONY: setup
setup: $(INSTALLED) ## make .venv with the pinned packages

.PHONY: reproduce
reproduce: $(INSTALLED) ## the paper's tables and figures with the default profile (cpu)
	specformer plan cpu
	dvc repro

.PHONY: smoke
smoke: $(INSTALLED) ## everything once, in minutes, to see that it runs
	@# Timings differ on each machine, so each run rewrites this lock; only cpu's is a record. DVC
	@# refuses a lock that git ignores, so it is committed and git told to overlook what changes.
	@if git ls-files --error-unmatch params/smoke/dvc.lock >/dev/null 2>&1; then \
		git update-index --skip-worktree params/smoke/dvc.lock; fi
	specformer plan smoke
	dvc repro params/smoke/dvc.yaml

.PHONY: test
test: $(INSTALLED) ## style, types, tests, the smoke run and the notebooks; git must stay clean
	@mkdir -p build && { git status --porcelain || true; } > build/status-before
	ruff check .
	ruff format --check .
	pyright
	pytest tests
	$(MAKE) smoke
	pytest --nbval notebooks/
	@{ git status --porcelain || true; } | diff build/status-before - || \
		{ echo "error: the tests changed these files" >&2; exit 1; }

.PHONY: test-server
test-server: $(INSTALLED) ## distill through a real vLLM: SPECFORMER_VLLM_PYTHON is the python that has it
	pytest -m server tests

.PHONY: test-gpu
test-gpu: $(INSTALLED) ## what needs a CUDA device, with a report for the README; torch must be a CUDA build
	pytest tests/gpu

.PHONY: lab
lab: $(INSTALLED) ## open the notebooks in JupyterLab
	jupyter lab --notebook-dir=notebooks

.PHONY: notebooks
notebooks: $(INSTALLED) ## run the notebooks at their defaults and store their outputs in them
	specformer notebooks

.PHONY: lock
lock: ## pin what pyproject.toml asks for now, in a fresh environment
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --editable '.[dev]'
	{ echo "# Linux, Python 3.11. Written by \`make lock\`; used by make and environment.yml." ; \
	  build/lock/bin/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9]+$$//' ; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

.PHONY: clean
clean: ## delete environment, smoke run and tool caches; data and trained drafts stay
	rm -rf .venv build data/smoke results/smoke figures/smoke .pytest_cache .ruff_cache *.egg-info

.PHONY: distclean
distclean: clean ## delete also data, trained drafts and DVC's cache
	rm -rf data .dvc/cache .dvc/tmp
