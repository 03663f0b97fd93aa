# From a clean machine: `make figure2` or `make test`. Either sets up .venv first; nothing else is needed
# than python3 (3.11 or newer), make and git.

SUITE ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
# Threads that wait by spinning make small operators 20 times slower on a machine that is shared.
export OMP_WAIT_POLICY ?= passive

RUNS_DIR := runs/$(SUITE)
RESULTS := results/$(SUITE)
FIGURES := figures/$(SUITE)
INSTALLED := $(VENV)/installed

.DELETE_ON_ERROR:
# A record is enough to draw from: weights that are gone are not trained again for their own sake.
.PRECIOUS: runs/$(SUITE)/%/model/model.safetensors
.PHONY: help setup test test-gpu check train clean figure2
.DEFAULT_GOAL := help

help: ## list every target
	@grep -hE '^[a-z0-9%-]+:.*?## ' $(firstword $(MAKEFILE_LIST)) | \
	  sed -E 's/^([a-z0-9%-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  SUITE=$(SUITE) is the suite at hand; choose another with SUITE=name (experiments/name.yaml)"

setup: $(INSTALLED) ## install everything into .venv

# constraints.txt pins what was tested; a GPU machine that has its own torch can pass PIN= to keep it.
PIN ?= -c constraints.txt
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) -e '.[test]'
	@touch $@

test: $(INSTALLED) ## run the tests (no GPU needed)
	$(RUN) pytest -m 'not gpu'

test-gpu: $(INSTALLED) ## run the tests of the kernels on this machine's GPU
	$(RUN) pytest -m gpu tests

check: $(INSTALLED) ## ruff
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

train: $(INSTALLED) ## train every run of SUITE, or RUN=name
	$(RUN) acp_repro.train --suite $(SUITE) $(if $(RUN_NAME),--run $(RUN_NAME))

# --- experiments/SUITE.yaml -> runs -> results -> figures -----------------------------------------
# The list of runs comes from the suite's file; make reads it anew when that file changes.
RULES := .make/$(SUITE).mk
ifneq (,$(filter figure% table% all report,$(MAKECMDGOALS)))
-include $(RULES)
endif

.make/%.mk: experiments/%.yaml $(INSTALLED)
	@mkdir -p .make
	@$(RUN) acp_repro.suite $* --make > $@.new && mv $@.new $@

$(RUNS_DIR)/%/model/model.safetensors: experiments/$(SUITE).yaml | $(INSTALLED)
	$(RUN) acp_repro.train --suite $(SUITE) --run $*

records = $(foreach run,$(1),$(foreach quantity,$(2),$(RESULTS)/$(run)/$(quantity).csv))

SAVINGS := pruned_ratio attention_time throughput
$(foreach quantity,$(SAVINGS),$(RESULTS)/%/$(quantity).csv): $(RUNS_DIR)/%/model/model.safetensors
	$(RUN) acp_repro.measure $(SAVINGS) --suite $(SUITE) --run $*

figure2: $(FIGURES)/figure2.png ## Figure 2: FLOPs, attention time and throughput saved by ACP
	@echo "figure: $(abspath $<)"

$(FIGURES)/figure2.png: analysis/figure2.py analysis/style.py analysis/statistics.py \
  analysis/paper_values.csv \
  $(call records,$(RUNS_ACP_PRO),$(SAVINGS))
	@$(RUN) analysis.figure2 --suite $(SUITE)

clean: ## delete what SUITE made: runs, results and figures
	rm -rf $(RUNS_DIR) $(RESULTS) $(FIGURES) $(RULES)
