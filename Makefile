# From a clean machine: `make figure2` or `make test`. Either sets up .venv first; nothing else is needed
# than python3 (3.11 or newer), make and git. What is missing for a figure, acp_repro.make finds out.

SUITE ?= cpu
PYTHON ?= python3
BIN := .venv/bin
# uv.lock pins what was tested; a GPU machine that has its own torch can pass PIN= to keep it.
PIN ?= .venv/pins.txt
# Threads that wait by spinning make small operators 20 times slower on a machine that is shared.
OMP_WAIT_POLICY ?= passive

VARIABLES := SUITE RUN NPROC JOBS ID GPU FORCE PYTHON BIN PIN OMP_WAIT_POLICY
UNKNOWN := $(filter-out $(VARIABLES) MAKEFLAGS,$(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v)))
LIKE = $(addprefix ; did you mean ,$(addsuffix ?,$(firstword $(foreach k,$(VARIABLES),$(if $(findstring $1,$k)$(findstring $k,$1),$k)))))
$(foreach v,$(UNKNOWN),$(error $v is no variable of this Makefile$(call LIKE,$v); the variables are $(VARIABLES)))
# The value of a variable reaches a recipe through the environment: neither make nor a shell expands it.
CHOSEN := $(filter command,$(origin SUITE))
$(foreach v,$(VARIABLES),$(if $(filter-out undefined,$(origin $v)),$(eval override export $v := $$(value $v))))
DO := "$$BIN/python" -m
STATIC := help setup test test-all test-gpu check notebooks docs train plan claim
export GOALS := $(filter-out $(STATIC),$(MAKECMDGOALS))

# With `make -j` too: one process makes what several goals lack, and trains on every core already.
.NOTPARALLEL:
.PHONY: $(STATIC) records figures tables report all reproduction clean
.DEFAULT_GOAL := help

help: ## list every target
	@grep -hE '^[a-zA-Z0-9%-]+:.*?## ' Makefile | \
	  sed -E 's/^([a-zA-Z0-9%-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'
	@[ ! -x "$$BIN/python" ] || PYTHON=$$BIN/python; "$$PYTHON" -m acp_repro.make help --suite "$$SUITE"

# Two stamps: what figures of ACP and `inspect` need, and everything, which includes the former.
EVERYTHING := .venv/installed
FIGURES := $(or $(wildcard $(EVERYTHING)),$(EVERYTHING)-figures)
setup: $(EVERYTHING) ## install everything into .venv; figures alone need less
$(EVERYTHING): EXTRAS := test
$(EVERYTHING)-figures: EXTRAS := figures,inspect

UV := $(shell which uv 2>/dev/null)
INSTALL := $(if $(UV),uv pip install --python "$$BIN/python",$(DO) pip install --disable-pip-version-check) $${PIN:+-c "$$PIN"}
HAS_VENV := test -x "$$BIN/$(if $(UV),python,pip)"
$(EVERYTHING) $(EVERYTHING)-figures: pyproject.toml uv.lock
	@"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: $$PYTHON is no Python of 3.11 or newer; run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(HAS_VENV) || "$$PYTHON" -c 'import ensurepip' 2>/dev/null || \
	  { echo "error: $$PYTHON cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }
	@$(HAS_VENV) || "$$PYTHON" -m venv .venv || \
	  { echo "error: $(CURDIR)/.venv cannot be made, see above; clone into a folder that you may write to"; exit 1; }
	@awk -F'"' '/^name =/ {n = $$2} /^version = "/ && n != "acp-repro" {print n "==" $$2}' uv.lock >.venv/pins.txt
	@echo "installing the extras $(EXTRAS) into .venv (a few minutes the first time)"
	@$(INSTALL) -e '.[$(EXTRAS)]' && touch $@

# Extras that few targets need, such as the LM Evaluation Harness, are installed with the first of these targets.
$(EVERYTHING)-docs $(EVERYTHING)-eval $(EVERYTHING)-lap $(EVERYTHING)-retention: $(EVERYTHING)-%: $(FIGURES)
	@echo "installing the extra $* into .venv"
	@$(INSTALL) -e '.[$*]' && touch $@

# A process for each core, with one thread each: threads of two processes would wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(DO) pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test: $(EVERYTHING) ## run the tests (no GPU needed), but for the slow ones
	$(PYTEST) -m 'not gpu and not slow'
test-all: $(EVERYTHING) ## run the slow tests too
	$(PYTEST) -m 'not gpu'
test-gpu: $(EVERYTHING) ## run the tests of the kernels on this machine's GPU
	$(DO) pytest -m gpu tests
check: $(EVERYTHING) ## ruff, and pyright over the library
	@test -x "$$BIN/ruff" -a -x "$$BIN/pyright" || $(INSTALL) ruff 'pyright[nodejs]'
	"$$BIN/ruff" check . && "$$BIN/ruff" format --check . && "$$BIN/pyright"
notebooks: $(EVERYTHING) ## run the notebooks and store them with their pictures
	"$$BIN/python" notebooks/refresh.py
docs: $(EVERYTHING)-docs ## build the documentation site, with its links checked
	@NO_MKDOCS_2_WARNING=1 $(DO) mkdocs build --strict && echo "page: $(CURDIR)/site/index.html"

RANKS := $${NPROC:+--nproc "$$NPROC"} $${JOBS:+--jobs "$$JOBS"}
train: $(FIGURES) ## train every run of SUITE, or RUN=name; NPROC=4: four GPUs a run; JOBS=4: four runs at once
	@exec $(DO) acp_repro.train --suite "$$SUITE" $${RUN:+--run "$$RUN"} $(RANKS)
plan: $(FIGURES) ## FLOPs, memory and GPU-hours of every run of SUITE; GPU=h100, NPROC=4
	@$(DO) acp_repro.plan --suite "$$SUITE" $${GPU:+--gpu "$$GPU"} $${NPROC:+--nproc "$$NPROC"}
# A claim that a test shows, or one of another paper, needs everything.
claim: $(if $(and $(ID),$(if $(CHOSEN),$(filter-out acp.%,$(ID)),yes)),$(EVERYTHING),$(FIGURES)) ## measure a claim of REPRODUCTION.md again, into results/: ID=acp.figure2.1; without ID: list all; SUITE=cpu
	@exec $(DO) analysis.reproduction.claim $${ID:+"$$ID"} $(if $(CHOSEN),--suite "$$SUITE")

# Whatever has no rule is a figure or table by name. One call makes all goals; `make -n` prints its commands.
DRY = $(if $(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),--dry-run)
PIPELINE = $(if $(DONE),@:,$(eval DONE := 1)+@exec $(DO) acp_repro.make --suite "$$SUITE" $(RANKS) $(DRY) $${FORCE:+--force} -- "$$GOALS")
records figures tables report all clean: $(FIGURES)
	$(PIPELINE)
reproduction: $(EVERYTHING)
	$(PIPELINE)
.DEFAULT:
	@$(MAKE) --no-print-directory --silent $(FIGURES)
	$(PIPELINE)
records: ## every record that the figures need
figures: ## every figure that the suite has runs for
tables: ## every table
report: ## one page with every figure, table and claim, checked
all: ## everything: train, measure, figures, tables, report
reproduction: ## one page with a verdict on every claim, from all published records
clean: ## delete what SUITE made: runs, results and figures
