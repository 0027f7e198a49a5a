# `make demo` and `make test` do all their own set-up in .venv. Nothing else needs to be installed but Python 3.11.
#
#   PYTHON=python3.11   the interpreter that makes .venv
#   TORCH_INDEX=URL     index of PyTorch's CPU builds, where pip's default index offers CUDA builds only
#   DRAFTS=4 PORT=23333 options of demo and serve
#   MODEL=glm           of demo and serve: qwen (default), glm, or a folder
#   SEED=N              of fuzz: repeat the steps of an earlier run
#   OUT=e2e-report      where e2e and e2e-npu write their report
PYTHON ?= python3.11
TORCH_INDEX ?=
DRAFTS ?= 4
PORT ?= 23333
MODEL ?=
OUT ?= e2e-report
VENV := .venv
RAY := .venv-ray
BIN := $(VENV)/bin
PIP_OPTIONS := --disable-pip-version-check --progress-bar on --no-deps
PIP := $(BIN)/python -m pip install $(PIP_OPTIONS)
# One thread a process: the tiny models are faster so, and two test processes share two cores.
export OMP_NUM_THREADS ?= 1
export PIP_NO_WARN_SCRIPT_LOCATION = 1

.PHONY: demo serve test test-long test-ray test-interpret test-native fuzz fuzz-nightly e2e soak e2e-npu mutate toolchain verify verify-all lint types format bench bench-engine bench-plots docs docs-tables clean help
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.engine: requirements/engine.txt setup.py
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] packages of requirements/engine.txt (torch $(if $(TORCH_INDEX),from $(TORCH_INDEX),from pip's index))"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/engine.txt
	@echo "[3/3] this package, editable"
	@$(PIP) setuptools==81.0.0 wheel==0.48.0
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.engine requirements/dev.txt
	@echo "[dev] packages of requirements/dev.txt"
	@$(PIP) -r requirements/dev.txt
	@touch $@

# Ray decides which executor LMDeploy takes, so it stays out of $(VENV): a second environment that also sees the first.
$(RAY)/.ray: $(VENV)/.dev requirements/ray.txt
	@echo "[ray] packages of requirements/ray.txt in $(RAY)"
	@$(BIN)/python -m venv --without-pip $(RAY)
	@echo "import site; site.addsitedir('$$(cd $(VENV)/lib/python3*/site-packages && pwd)')" \
		> $$(echo $(RAY)/lib/python3*/site-packages)/base.pth
	@$(BIN)/python -m pip --python $(RAY)/bin/python install $(PIP_OPTIONS) -r requirements/ray.txt
	@touch $@

demo: $(VENV)/.engine ## serve a trained tiny model (MODEL=qwen or glm) with MTP through stock LMDeploy, ask it, check it
	@$(BIN)/python -m dlinfer_ext demo --model $(or $(MODEL),qwen) --drafts $(DRAFTS)

serve: $(VENV)/.engine ## leave the demo's server running on 127.0.0.1:$(PORT)
	@$(BIN)/python -m dlinfer_ext demo --serve --model $(or $(MODEL),qwen) --drafts $(DRAFTS) --port $(PORT)

$(VENV)/.toolchain: $(VENV)/.dev dlinfer_ext/toolchain/requirements.txt
	@echo "[toolchain] Ascend compiler wheels in a folder of their own"
	@$(BIN)/python -m dlinfer_ext verify --install
	@touch $@

toolchain: $(VENV)/.toolchain ## bring the Ascend compiler wheels, which need no card and no CANN

test: $(VENV)/.toolchain $(VENV)/.report ## all tests but those of test-long, test-ray and verify; a part of them also on the interpreted kernels
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not toolchain and not long" --durations=10
	$(BIN)/python -m pytest -n 2 -q --route interpret --at-most 4 tests/kernels

test-long: $(VENV)/.dev $(VENV)/.report $(VENV)/.docs ## what `make test` has no time for: more engine runs, servers under load, all sequences of six steps, the site
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m long

test-interpret: $(VENV)/.toolchain ## all operator tests on the interpreted kernels
	$(BIN)/python -m pytest -n 2 -q --route interpret tests/kernels

test-native: $(VENV)/.toolchain ## all operator tests on the native kernels
	$(BIN)/python -m pytest -n 2 -q --route native tests/kernels tests/ops

fuzz: $(VENV)/.dev ## 10,000 random steps of the operators on every layout, each against its definition; SEED=N repeats one
	$(BIN)/python -m tests.fuzz --steps 10000 --seconds 240 $(if $(SEED),--seed $(SEED))

fuzz-nightly: $(VENV)/.dev ## the same with 300,000 steps, an hour at most
	$(BIN)/python -m tests.fuzz --steps 300000 --seconds 3600 $(if $(SEED),--seed $(SEED))

mutate: $(VENV)/.dev ## each known fault planted in a running engine: a scenario of configs/e2e has to catch it
	$(BIN)/python -m tests.mutate

test-ray: $(RAY)/.ray ## two ranks on LMDeploy's Ray executor
	$(RAY)/bin/python -m pytest tests/e2e/test_ray.py tests/e2e/test_scenarios.py -k "ray or lost_rank"

e2e: $(VENV)/.engine ## every scenario of configs/e2e on this CPU, with a report in $(OUT)
	$(BIN)/python -m dlinfer_ext e2e --out $(OUT)

soak: $(VENV)/.engine ## the server under load, some of it malformed: five minutes of Qwen3.5, two of GLM-5.3-Flash
	$(BIN)/python -m dlinfer_ext e2e --config soak_load
	$(BIN)/python -m dlinfer_ext e2e --config soak_short --model examples/checkpoints/tiny_glm5_next

# On a card: PYTHON is that of the environment in which LMDeploy runs, with this package and pytest in it.
e2e-npu: ## the scenarios on a card, with a report in $(OUT): make e2e-npu MODEL=PATH [PYTHON=python3]
	@test -n "$(MODEL)" || { echo "make e2e-npu MODEL=PATH, the folder of a checkpoint"; exit 2; }
	E2E_MODEL=$(MODEL) E2E_OUT=$(OUT) $(PYTHON) -m pytest -m npu -rs tests/e2e/test_scenarios.py

VERIFY := $(BIN)/python -m dlinfer_ext verify
MODELS := qwen3_5-9b,qwen3_5-35b-a3b,qwen3_5-397b,glm-5.3-flash

verify: $(VENV)/.toolchain ## kernels without a card: native at a model's sizes, bytes counted, HIVM, LMDeploy on them
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m toolchain
	$(BIN)/python -m pytest -n 2 -q --route native --at-most 12 tests/kernels
	$(VERIFY) --native --count --soc a2,a3,a5 --model qwen3_5-9b --tp 1
	$(VERIFY) --soc a2,a5 --model $(MODELS) --tp 8

verify-all: $(VENV)/.toolchain ## every kernel, chip, model and tp to HIVM (minutes, seconds when repeated)
	$(VERIFY) --soc a2,a3,a5 --model $(MODELS) --tp 1,2,4,8

lint: $(VENV)/.dev ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy --strict
	$(BIN)/mypy

format: $(VENV)/.dev ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.engine ## operators against public formulations of the same work, ratios in one run
	$(BIN)/python -m dlinfer_ext bench ops

bench-engine: $(VENV)/.engine ## the trained tiny models through stock LMDeploy, beside loops over requests and beside no drafts
	$(BIN)/python -m dlinfer_ext bench engine

$(VENV)/.report: $(VENV)/.engine requirements/report.txt
	@echo "[report] packages of requirements/report.txt"
	@$(PIP) -r requirements/report.txt
	@touch $@

bench-plots: $(VENV)/.report ## both, with results and pictures in bench-results
	@mkdir -p bench-results
	$(BIN)/python -m dlinfer_ext bench engine --out bench-results/engine.json --plots bench-results
	$(BIN)/python -m dlinfer_ext bench ops --seconds 3 --out bench-results/ops.json --plots bench-results

$(VENV)/.docs: $(VENV)/.dev requirements/docs.txt
	@echo "[docs] packages of requirements/docs.txt"
	@$(PIP) -r requirements/docs.txt
	@touch $@

docs: $(VENV)/.docs ## the pages as a site in build/site, both languages, with a search; EXTERNAL=1 asks the web for each outside link
	@$(BIN)/python -m docs.tools.build $(if $(EXTERNAL),--external)

docs-tables: $(VENV)/.engine ## print the tables that pages take from configs/, and write them and the figures into docs/
	@$(BIN)/python -m docs.tools.tables
	@$(BIN)/python -m docs.tools.figures

clean: ## remove what the targets made
	rm -rf $(VENV) $(RAY) bench-results build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
