# From a clean machine: `make figure2` or `make test`. Either sets up .venv first; nothing else is needed
# than python3 (3.11 or newer), make and git.

SUITE ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DO := $(BIN)/python -m
# Threads that wait by spinning make small operators 20 times slower on a machine that is shared.
export OMP_WAIT_POLICY ?= passive

# A suite is a name in experiments/, or a file that ends in .yaml.
SUITE_FILE := $(if $(filter %.yaml,$(SUITE)),$(SUITE),experiments/$(SUITE).yaml)
NAME := $(patsubst %.yaml,%,$(notdir $(SUITE_FILE)))
RUNS_DIR := runs/$(NAME)
RESULTS := results/$(NAME)
FIGURES := figures/$(NAME)
INSTALLED := $(VENV)/installed

.DELETE_ON_ERROR:
# With `make -j` too: one recipe makes what several targets lack, and trains on every core already.
.NOTPARALLEL:
.PHONY: FORCE help setup test test-all test-gpu check notebooks docs train plan clean records figures tables \
  report all reproduction claim
.DEFAULT_GOAL := help

help: ## list every target
	@grep -hE '^[a-zA-Z0-9%-]+:.*?## ' $(firstword $(MAKEFILE_LIST)) | \
	  sed -E 's/^([a-zA-Z0-9%-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "  SUITE=$(SUITE) is the suite at hand; choose another with SUITE=name (experiments/name.yaml) or SUITE=file.yaml"
	@echo "Figures and tables, each made with all that it needs:"
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m acp_repro.chain.rules --items $(SUITE)

setup: $(INSTALLED) ## install everything into .venv

# constraints.txt pins what was tested; a GPU machine that has its own torch can pass PIN= to keep it.
PIN ?= -c constraints.txt
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(CURDIR)/$(VENV) cannot be made, see above; clone into a folder that you may write to"; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) -e '.[test]'
	@touch $@

# What few targets need, such as the LM Evaluation Harness, comes with the first of them.
$(INSTALLED)-%: $(INSTALLED)
	@echo "installing the extra $* into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) -e '.[$*]'
	@touch $@

# A process for each core, with one thread each: threads of two processes would wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(DO) pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test: $(INSTALLED) ## run the tests (no GPU needed), but for the slow ones
	$(PYTEST) -m 'not gpu and not slow'

test-all: $(INSTALLED) ## run the slow tests too
	$(PYTEST) -m 'not gpu'

test-gpu: $(INSTALLED) ## run the tests of the kernels on this machine's GPU
	$(DO) pytest -m gpu tests

check: $(INSTALLED) ## ruff
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

notebooks: $(INSTALLED) ## run the notebooks and store them with their pictures
	$(BIN)/python notebooks/refresh.py

docs: $(INSTALLED)-docs ## build the documentation site, with its links checked
	@NO_MKDOCS_2_WARNING=1 $(DO) mkdocs build --strict && echo "page: $(CURDIR)/site/index.html"

TRAIN := $(DO) acp_repro.train$(if $(NPROC), --nproc $(NPROC))$(if $(JOBS), --jobs $(JOBS))
train: $(INSTALLED) ## train every run of SUITE, or RUN=name; NPROC=4: four GPUs a run; JOBS=4: four runs at once
	$(TRAIN) --suite $(SUITE) $(if $(RUN),--run $(RUN))

plan: $(INSTALLED) ## FLOPs, memory and GPU-hours of every run of SUITE; GPU=h100, NPROC=4
	@$(DO) acp_repro.plan --suite $(SUITE) $(if $(GPU),--gpu $(GPU)) $(if $(NPROC),--nproc $(NPROC))

# --- experiments/SUITE.yaml -> runs -> results -> figures -----------------------------------------
# All rules of the chain are generated, from the suite's file and the registry of its paper: a target for
# each run's weights, each record, each figure and table, and the lists ITEMS, USUAL_ITEMS and so on.
RULES := .make/$(subst /,+,$(SUITE)).mk
STATIC := help setup test test-all test-gpu check notebooks docs train plan claim clean
CHAIN := $(filter-out $(STATIC) $(INSTALLED)-%,$(MAKECMDGOALS))
ifneq (,$(CHAIN)$(filter help train plan clean,$(or $(MAKECMDGOALS),help)))
ifneq (1,$(words $(SUITE)))
$(error SUITE=$(SUITE): a path with spaces is too much for make; link the file into experiments/ and give its name)
endif
ifeq (,$(wildcard $(SUITE_FILE)))
$(error $(SUITE_FILE): no such suite; there are: $(patsubst %.yaml,%,$(notdir $(wildcard experiments/*.yaml))))
endif
ifneq (,$(filter-out $(realpath $(SUITE_FILE)),$(realpath experiments/$(NAME).yaml)))
$(error $(SUITE_FILE): experiments/$(NAME).yaml has its name, and so its runs, records and figures; rename it)
endif
endif
ifneq (,$(CHAIN))
include $(RULES)
endif

.DEFAULT:
	@echo "error: nothing is called $@; suite $(SUITE) has $(ITEMS), and make help lists the rest" >&2; exit 2

# Made at every call, because they say what is up to date. Make starts again where they have changed.
$(RULES): $(if $(MAKE_RESTARTS),,FORCE) | $(INSTALLED)
	@mkdir -p .make
	@$(DO) acp_repro.chain.rules $(SUITE) > $@.new && if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

# What is asked for, so that one process makes all that it lacks.
ASKED := $(sort $(filter $(ITEMS),$(CHAIN)) \
  $(if $(filter figures tables records report all,$(CHAIN)),$(USUAL_ITEMS)))
FOR := $(if $(ASKED),--for $(ASKED))

records: $(USUAL_RECORDS) ## every record that the figures need
figures: $(ALL_FIGURES) ## every figure that the suite has runs for
tables: $(ALL_TABLES) ## every table
report: $(FIGURES)/report.html ## one page with every figure, table and claim, checked
	$(if $(drawn_report),@:,@echo "report: $(abspath $<)")
all: report ## everything: train, measure, figures, tables, report

# Of every suite and paper at once, from the records that lie there: by names that no rule makes again (`./`).
reproduction: REPRODUCTION.md ## one page with a verdict on every claim, from all published records
	@echo "page: $(abspath $<)"
REPRODUCTION.md: $(wildcard experiments/*.yaml results/./*/*/*.csv*) | $(INSTALLED)
	@$(DO) analysis.reproduction > /dev/null

# On the runs that the page quotes, unless a suite is named.
claim: | $(INSTALLED) ## measure a claim of REPRODUCTION.md again, into results/: ID=acp.figure2.1; without ID: list all; SUITE=cpu
	@$(DO) analysis.reproduction.claim $(ID) $(if $(filter command line,$(origin SUITE)),--suite $(SUITE))

clean: ## delete what SUITE made: runs, results and figures
	@test -z "$(FORCE)$$(git ls-files $(RESULTS) 2>/dev/null)" || test -n "$(FORCE)" || \
	  { echo "error: $(RESULTS) came with the project; make clean SUITE=$(SUITE) FORCE=1 deletes it"; exit 1; }
	rm -rf $(RUNS_DIR) $(RESULTS) $(FIGURES) $(RULES) .make/$(NAME)
