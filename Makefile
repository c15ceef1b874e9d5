# make demo       merge eight small models, with NUFILT and with FusionBench's own continual methods
# make test       lint, types, the documentation and the tests
# make test-oldest  some of the tests, with the lowest versions that pyproject.toml allows
# make test-slow  the tests that take minutes: kills, clusters, notebooks, a browser
# make nightly    bad inputs, random corruptions and kills; FusionBench's own distribution with the contribution, and
#                 the newest Python
# make oracle     merges drawn at random, compared with formulas and laws: CASES=1000 SEED=0 MINUTES=60
# make docs       the documentation in outputs/site; a broken link or reference fails
# make figures    the demo's numbers and pictures in README and pages, from this machine
# make release    a source distribution and a wheel in dist/, checked, of a tagged version
# make constraints  the versions in .venv, in constraints.txt
# Each sets up what it needs in .venv first, torch and otherwise what pip settles for on the day: the demo what a user
# installs, the others the developers' tools, too.

PYTHON ?= python3
VENV ?= .venv
# The release that everything here was tested and measured with. On a machine without a GPU, install the CPU build
# into $(VENV) beforehand to save a large download.
export TORCH ?= torch==2.13.0

# With the lowest versions of all else.
OLDEST_TORCH ?= $(TORCH)

# Processes of the tests, which take about 1 GB each. Slow ones start processes of their own, and one cluster at a time.
JOBS ?= 2

# Threads that wait by spinning stall each other on a busy machine: ten times slower here.
export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
OLDEST := $(VENV)/oldest

# pip would compile all files one after another. Some packages bring files of other Pythons, which can't be compiled.
INSTALL := -m pip install --quiet --no-compile
compile = $(1)/bin/python -m compileall -qq --workers 0 $(1)/lib || true

# NUFILT's ranks have the paper's ratio to the width; its own, 128 and 64, would filter everything at a width of 128.
DEMO_METHODS := TSV-M with spectral voting = best, spectral voting = spectral, NUFILT all-linear = nufilt/all_linear, \
	NUFILT (ranks 21/10/8) = nufilt:null_rank=21:lora_rank=10, OPCM = opcm, task arithmetic = task_arithmetic, \
	TSV-M = tsvm, weight averaging = weight_average

FIGURES := outputs/figures
RANKS := null_rank=21:lora_rank=10
COMPARE := $(BIN)/nufilt compare --seeds 42 fabric.accelerator=cpu --overwrite

.PHONY: figures demo test test-oldest test-slow nightly oracle lint docs release constraints clean

demo: $(INSTALLED)
	$(BIN)/nufilt compare fabric.accelerator=cpu --methods "$(DEMO_METHODS)" --out outputs/demo --overwrite
	rm -rf outputs/demo_adapter
	$(BIN)/python tools/merge_demo_adapters.py --out outputs/demo_adapter
	@echo "The digits depend on the CPU that trains the models, by a point or two."

test: lint docs
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-oldest: $(READY) $(OLDEST)/.ready
	NUFILT_OTHER_PYTHON=$(abspath $(BIN)/python) \
		$(OLDEST)/bin/python -m pytest -m "oldest and not nightly" --numprocesses $(JOBS) --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --numprocesses $(JOBS) --dist worksteal

nightly: $(READY) $(OLDEST)/.ready
	$(BIN)/python -m pytest -m nightly
	$(OLDEST)/bin/python -m pytest -m "nightly and oldest"

oracle: $(READY)
	ORACLE_CASES=$(CASES) ORACLE_SEED=$(SEED) ORACLE_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/oracle \
		-m "oracle or not oracle" --numprocesses $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

figures: $(READY) demo
	$(COMPARE) --evaluate diagonal --out $(FIGURES)/more --methods "nufilt, dop, sum, tsv_stream, \
		nufilt/all_linear:$(RANKS), nufilt/all_linear:null_rank=128, sequential_finetuning, adamerging, lora_wemoe"
	rm -rf $(FIGURES)/run $(FIGURES)/analysis
	$(BIN)/fusion_bench method=nufilt modelpool=nufilt_demo method.null_rank=21 method.lora_rank=10 \
		fabric.accelerator=cpu path.log_dir=$(FIGURES)/run > $(FIGURES)/terminal.txt
	mv $(FIGURES)/terminal.txt $(FIGURES)/run
	$(BIN)/nufilt analyze fabric.accelerator=cpu --out $(FIGURES)/analysis
	$(BIN)/python tools/figures.py outputs/demo $(FIGURES)/more $(FIGURES)/run $(FIGURES)/analysis

release: $(READY)
	$(BIN)/python tools/release.py
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Before the one that lies inside: two that are made at once find each other's folder.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python $(INSTALL) $(TORCH) --editable .
	$(call compile,$(VENV))
	touch $@

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python $(INSTALL) $(TORCH) --editable '.[dev,mergekit]'
	$(call compile,$(VENV))
	touch $(INSTALLED) $@

# By default not the lowest torch: earlier releases without gigabytes of CUDA are only on PyTorch's own index.
$(OLDEST)/.ready: pyproject.toml tools/oldest.py | $(BIN)/python
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tools/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(INSTALL) --constraint $(OLDEST)/constraints.txt $(OLDEST_TORCH) --editable '.[dev]'
	$(call compile,$(OLDEST))
	touch $@

# Those of a green run, for whoever wants its figures; the build of torch is the user's choice.
constraints: $(READY)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist outputs
