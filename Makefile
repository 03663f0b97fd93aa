# From a clean machine: `make figure2` or `make test`. Either sets up .venv first; nothing else is needed
# than python3 (3.11 or newer), make and git.

SUITE ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DO := $(BIN)/python -m
# Threads that wait by spinning make small operators 20 times slower on a machine that is shared.
export OMP_WAIT_POLICY ?= passive

RUNS_DIR := runs/$(SUITE)
RESULTS := results/$(SUITE)
FIGURES := figures/$(SUITE)
INSTALLED := $(VENV)/installed

FIGURE_TARGETS := $(addprefix figure,1 2 3 4 5 6 7 8 10 11 A1 A2 A3)
TABLE_TARGETS := table2 table4

.DELETE_ON_ERROR:
# A record is enough to draw from: weights that are gone are not trained again for their own sake.
.PRECIOUS: runs/$(SUITE)/%/model/model.safetensors
.PHONY: help setup test test-gpu check train plan clean figure-kernel records figures tables report all $(FIGURE_TARGETS) $(TABLE_TARGETS)
.DEFAULT_GOAL := help

help: ## list every target
	@grep -hE '^[a-zA-Z0-9%-]+:.*?## ' $(firstword $(MAKEFILE_LIST)) | \
	  sed -E 's/^([a-zA-Z0-9%-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'
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
	$(DO) pytest -m 'not gpu'

test-gpu: $(INSTALLED) ## run the tests of the kernels on this machine's GPU
	$(DO) pytest -m gpu tests

check: $(INSTALLED) ## ruff
	@$(BIN)/pip install --quiet --disable-pip-version-check $(PIN) ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# With NPROC the ranks of one machine. Without the -- torchrun would read our --run as its own --run-path.
TRAIN := $(if $(NPROC),$(DO) torch.distributed.run --standalone --nproc-per-node $(NPROC) -m -- acp_repro.train,$(DO) acp_repro.train)
train: $(INSTALLED) ## train every run of SUITE, or RUN=name; NPROC=4 takes four GPUs
	$(TRAIN) --suite $(SUITE) $(if $(RUN),--run $(RUN))

plan: $(INSTALLED) ## FLOPs, memory and GPU-hours of every run of SUITE; GPU=h100, NPROC=4, CHECK=1
	@$(DO) acp_repro.plan --suite $(SUITE) $(if $(GPU),--gpu $(GPU)) $(if $(NPROC),--nproc $(NPROC)) $(if $(CHECK),--check)

# --- experiments/SUITE.yaml -> runs -> results -> figures -----------------------------------------
# The list of runs comes from the suite's file, and beside it a stamp for the settings of each run and of
# the measures: what a change of the file does not touch is not done again.
RULES := .make/$(SUITE).mk
ifneq (,$(filter-out figure-kernel,$(filter figure% table% tables records report all train plan clean,$(MAKECMDGOALS))))
ifeq (,$(wildcard experiments/$(SUITE).yaml))
$(error no suite $(SUITE) in experiments/; there are: $(basename $(notdir $(wildcard experiments/*.yaml))))
endif
ifneq (,$(filter-out train plan clean,$(MAKECMDGOALS)))
include $(RULES)
endif
endif

.make/%.mk: experiments/%.yaml acp_repro/suite.py acp_repro/settings.py acp_repro/make_rules.py $(INSTALLED)
	@mkdir -p .make
	@$(DO) acp_repro.make_rules $* .make/$* > $@.new && mv $@.new $@

STAMPS := .make/$(SUITE)
# A suite with ready weights (READY, a folder) is never trained.
MODELS := $(if $(READY),$(READY)/%,$(RUNS_DIR)/%/model)
ifeq (,$(READY))
$(MODELS)/model.safetensors: $(STAMPS)/%.json | $(INSTALLED)
	$(TRAIN) --suite $(SUITE) --run $* && touch $@
else
$(MODELS)/model.safetensors:
	@echo "error: $@ is missing; it comes with the project: git checkout -- $(READY)"; exit 1
endif

records = $(foreach run,$(1),$(foreach quantity,$(2),$(RESULTS)/$(run)/$(quantity).csv))

# One call of the measure command for what is needed together: loading a model takes longer than some measures.
define measured_together
$(foreach quantity,$(1),$(RESULTS)/%/$(quantity)): $(MODELS)/model.safetensors $(STAMPS)/measure.json $(if $(READY),$(STAMPS)/%.json)
	$$(DO) acp_repro.measure $(foreach quantity,$(1),$(firstword $(subst ., ,$(quantity)))) --suite $(SUITE) --run $$* --again
endef
SAVINGS := pruned_ratio.csv attention_time.csv throughput.csv
LOSSES := loss.csv loss_curve.csv.gz
HEADS := decay.csv.gz attention_weights.csv.gz
# A measure that fails or is stopped must not cost the records that it would have replaced.
.PRECIOUS: $(foreach one,$(SAVINGS) $(LOSSES) $(HEADS),$(RESULTS)/%/$(one))
$(foreach group,SAVINGS LOSSES HEADS,$(eval $(call measured_together,$($(group)))))
$(foreach one,epsilon_sweep.csv pruned_mass.csv block_size.csv long_context.csv,$(eval $(call measured_together,$(one))))

# $(call records,RUNS,FILES): every file of every run
records = $(foreach run,$(1),$(addprefix $(RESULTS)/$(run)/,$(2)))

figure1_needs := $(call records,$(HEADS_RUN),$(HEADS))
figure2_needs := $(call records,$(RUNS_ACP_PRO),$(SAVINGS))
figure3_needs := analysis/loss_curves.py $(call records,$(TWINS_PRO_LARGEST),$(LOSSES))
figure4_needs := $(call records,$(HEADS_RUN),$(SAVINGS))
figure5_needs := analysis/figure4.py $(figure4_needs)
figure6_needs := $(figure1_needs)
figure7_needs := analysis/sweeps.py $(call records,$(SWEEP_RUN),epsilon_sweep.csv)
figure8_needs := analysis/loss_curves.py $(call records,$(TWINS_PRO_OTHER),$(LOSSES))
figure10_needs := analysis/figure2.py $(call records,$(RUNS_ACP_LLAMA),$(SAVINGS))
figure11_needs := analysis/loss_curves.py $(call records,$(TWINS_LLAMA),$(LOSSES))
figureA1_needs := analysis/sweeps.py $(call records,$(SWEEP_RUN),pruned_mass.csv)
figureA2_needs := analysis/sweeps.py $(call records,$(SWEEP_RUN),block_size.csv)
figureA3_needs := analysis/sweeps.py $(call records,$(SWEEP_RUN),long_context.csv)
table2_needs := experiments/$(SUITE).yaml
table4_needs := $(figure2_needs)

# A suite draws what its grid has runs for.
FIGURE_NAMES := 1 2 $(if $(TWINS_PRO_LARGEST),3) 4 5 6 7 $(if $(TWINS_PRO_OTHER),8) \
  $(if $(RUNS_ACP_LLAMA),10) $(if $(TWINS_LLAMA),11) A1 A2 A3
ALL_FIGURES := $(FIGURE_NAMES:%=$(FIGURES)/figure%.png)
ALL_TABLES := $(FIGURES)/table2.md $(FIGURES)/table4.md

figure1: ## the grid of blocks, with and without ACP, from a real head
figure2: ## FLOPs, attention time and throughput saved by ACP (FoX Pro)
figure3: ## loss against position with and without ACP (figure8: other sizes, figure11: LLaMA)
figure4: ## how savings are spread over the heads (figure5: within each layer)
figure6: ## decay and attention of some heads
figure7: ## savings against epsilon
figure10: ## Figure 2 for FoX (LLaMA)
figureA1: ## ours: the pruned mass of every row against epsilon (A2: block size, A3: long contexts)
table2: ## the sizes of the suite (table4: share of time spent on the boundary search)
$(FIGURE_TARGETS): figure%: $(FIGURES)/figure%.png
	@echo "figure: $(abspath $<)"
$(TABLE_TARGETS): table%: $(FIGURES)/table%.md
	@cat $<

.SECONDEXPANSION:
$(FIGURES)/figure%.png: analysis/figure%.py analysis/style.py analysis/statistics.py analysis/paper_values.csv $$(figure$$*_needs)
	@$(DO) analysis.figure$* --suite $(SUITE)
$(FIGURES)/table%.md: analysis/table%.py analysis/style.py analysis/paper_values.csv $$(table$$*_needs)
	@$(DO) analysis.table$* --suite $(SUITE) > /dev/null

records: $(filter $(RESULTS)/%,$(foreach name,$(FIGURE_NAMES),$(figure$(name)_needs))) ## every record that the figures need
figure-kernel: $(FIGURES)/figure_kernel.png ## time and TFLOP/s of the kernels against length, beside every rival
	@echo "figure: $(abspath $<)"
$(FIGURES)/figure_kernel.png: analysis/figure_kernel.py analysis/style.py $(RESULTS)/benchmark/kernel_time.csv
	@$(DO) analysis.figure_kernel --suite $(SUITE)
$(RESULTS)/benchmark/kernel_time.csv: | $(INSTALLED)
	$(DO) acp_repro.benchmark_attention --suite $(SUITE)

figures: $(ALL_FIGURES) ## every figure that the suite has runs for
tables: $(ALL_TABLES) ## every table
report: $(FIGURES)/report.html ## one page with every figure, table and claim, checked
	@echo "report: $(abspath $<)"
$(FIGURES)/report.html: $(ALL_FIGURES) $(ALL_TABLES) $(wildcard analysis/report*) analysis/criteria.py analysis/paper_values.csv
	@$(DO) analysis.report --suite $(SUITE)
all: report ## everything: train, measure, figures, tables, report

clean: ## delete what SUITE made: runs, results and figures
	@test -z "$(FORCE)$$(git ls-files $(RESULTS) 2>/dev/null)" || test -n "$(FORCE)" || \
	  { echo "error: $(RESULTS) came with the project; make clean SUITE=$(SUITE) FORCE=1 deletes it"; exit 1; }
	rm -rf $(RUNS_DIR) $(RESULTS) $(FIGURES) $(RULES) $(STAMPS)
