# make demo       merge eight small models, with NUFILT and with FusionBench's own continual methods
# make test       lint, types, the documentation and the tests
# make test-compat  some of the tests, with transformers 5
# make test-slow  the tests that take minutes: kills, clusters, notebooks, a browser
# make adversary  bad inputs, random corruptions and kills, and a table of what became of them; for every night
# make docs       the documentation in outputs/site; a broken link or reference fails
# Each sets up everything they need in .venv first.

PYTHON ?= python3
VENV ?= .venv
# The release that everything here was tested and measured with. On a machine without a GPU, install the CPU build
# into $(VENV) beforehand to save a large download.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers>=4.57,<5

# Processes of the fast tests, which take about 1 GB each. The slow ones start processes and clusters of their own.
JOBS ?= 2

# Threads that wait by spinning stall each other on a busy machine: ten times slower here.
export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV5 := $(VENV)/transformers5
BIN5 := $(VENV5)/bin
SITE := import site; print(site.getsitepackages()[0])

.PHONY: demo test test-compat test-slow adversary lint docs clean

demo: $(READY)
	$(BIN)/python -m fusion_bench_nufilt.demo

test: lint docs
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-compat: $(VENV5)/.ready
	PYTHONPATH=$(CURDIR) NUFILT_OTHER_PYTHON=$(abspath $(BIN)/python) \
		$(BIN5)/python -m pytest -m "compat and not slow" --numprocesses $(JOBS) --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --ignore=tests/adversary

adversary: $(READY)
	$(BIN)/python -m pytest tests/adversary -m "slow or not slow" --tally

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) '$(TRANSFORMERS)' --editable '.[dev]'
	touch $@

# The packages of $(VENV) but for transformers.
$(VENV5)/.ready: $(READY)
	$(BIN)/python -m venv $(VENV5)
	$(BIN)/python -c "$(SITE)" > "$$($(BIN5)/python -c "$(SITE)")/shared.pth"
	$(BIN5)/python -m pip install --quiet 'transformers>=5,<6'
	touch $@

clean:
	rm -rf $(VENV) build dist outputs
