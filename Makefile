# `make help` lists the targets. POSIX sh and GNU make 3.81 (macOS) or later.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --require-virtualenv
# Wheels only, each checked against its hash in the lock file; the package itself is linked, not copied.
INSTALL = $(PIP) install --quiet --require-hashes --only-binary :all: -r
LINK = $(PIP) install --quiet --no-deps --no-index --no-build-isolation --editable .
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all lint format coverage docs bench quality quality-code loadtest loadtest-gate
.PHONY: loadtest-compare lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: root-check $(VENV)/.installed ## set up and run the memory (PORT=8484, WARMSTART_HOME=…)
	@exec $(VENV)/bin/warmstart serve

setup: $(VENV)/.installed-dev ## set up what tests and checks need

test: $(VENV)/.installed-dev ## set up and pass the tests; what this machine can't run is named
	$(PY) tests/run.py

test-all: lint ## checks, and all tests with coverage; takes an hour
	$(PY) tests/run.py --slow --coverage

coverage: $(VENV)/.installed-dev ## the tests, and which lines they miss
	$(PY) tests/run.py --coverage

lint: $(VENV)/.installed-dev ## formatting, lint, types, direction of imports
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev ## format the code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(VENV)/.installed-dev ## write the generated pages of docs/ again
	$(PY) -m docs.generate

bench: $(VENV)/.installed-dev ## measure speed and memory against raw LanceDB; takes minutes
	$(PY) -m loadtests.bench

quality: $(VENV)/.installed-dev ## measure what search finds against each arm alone, and when prompts get a block; takes minutes
	$(PY) -m loadtests.quality
	$(PY) -m loadtests.quality.public
	$(PY) -m loadtests.quality.silence

quality-code: $(VENV)/.installed-dev ## measure the indexer on three packages it fetches; takes minutes
	$(PY) -m loadtests.quality.code

loadtest: $(VENV)/.installed-dev ## load on the stack in containers, or on URL=… KEY=… (SCENARIO=baseline)
	@KEY='$(KEY)' $(PY) -m loadtests run --scenario '$(or $(SCENARIO),baseline)' $(if $(URL),--url '$(URL)') \
	  $(if $(CONFIRM_HOST),--confirm-host '$(CONFIRM_HOST)')

loadtest-gate: $(VENV)/.installed-dev ## the load that every change must bear; three minutes
	$(PY) -m loadtests gate

loadtest-compare: $(VENV)/.installed-dev ## two reports side by side: A=… B=… (folders)
	@$(PY) -m loadtests compare '$(A)' '$(B)'

lock: $(VENV)/.installed-dev ## bring the lock files up to pyproject.toml (UPGRADE=1: newest versions)
	@for lock in "requirements.lock --extra server --extra local --extra index" \
	             "requirements-server.lock --extra server --constraint requirements.lock" \
	             "requirements-dev.lock --all-extras --group pyproject.toml:ops --group pyproject.toml:load --constraint requirements.lock"; do \
	  set -- $$lock; output=$$1; shift; \
	  echo 'setuptools>=77' | $(VENV)/bin/uv pip compile --quiet pyproject.toml - "$$@" $(if $(UPGRADE),--upgrade) \
	    --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command 'make lock' --output-file $$output || exit 1; \
	done
	@$(VENV)/bin/uv pip compile --quiet --group pyproject.toml:ops --constraint requirements-dev.lock \
	  --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' --output-file requirements-ops.lock
	@wheels=$$(mktemp -d) && trap 'rm -rf "$$wheels"' EXIT && \
	$(PIP) download --quiet --no-deps --require-hashes --only-binary :all: -r requirements.lock -d "$$wheels" && \
	$(PY) -c "$$SIZES" "$$wheels" requirements.lock

clean: ## remove the environment and what tools left; never a memory's data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage build .cache

# -- what the targets above stand on

.PHONY: root-check
root-check: # before anything is made, so that nothing of root's is left behind
	@if [ "$$(id -u)" = 0 ] && [ -z "$$WARMSTART_ALLOW_ROOT" ]; then \
	  echo "Running as root is refused: use another user, or WARMSTART_ALLOW_ROOT=True make run" >&2; exit 1; fi

# The dev lock holds all of the other one in the same versions.
$(VENV)/.installed: requirements.lock pyproject.toml | $(PY)
	@sed -n 's/^# first run: //p' requirements.lock
	@echo "From the package index pip is set up with; into $(CURDIR)/$(VENV), copies in $$($(PIP) cache dir)."
	@$(INSTALL) requirements.lock && $(LINK) && touch $@

$(VENV)/.installed-ops: requirements-ops.lock | $(PY)
	@echo "Installing what a deploy needs into $(CURDIR)/$(VENV)"
	@$(INSTALL) requirements-ops.lock && touch $@

$(VENV)/.installed-dev: requirements-dev.lock pyproject.toml | $(PY)
	@echo "Installing what tests and checks need into $(CURDIR)/$(VENV) (some 500 MB to download on the first run)"
	@$(INSTALL) requirements-dev.lock && $(LINK) && touch $@

$(PY):
	@for python in $(PYTHON) $(PYTHONS); do \
	  if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then exec "$$python" -m venv --clear $(VENV); fi; \
	done; \
	echo "Python 3.11 or later with venv is needed: apt install python3-venv (Debian, Ubuntu)," \
	  "brew install python (macOS), or name one: make run PYTHON=/path/to/python3" >&2; exit 1

define SIZES
import pathlib, sys, zipfile
wheels = list(pathlib.Path(sys.argv[1]).glob("*.whl"))
download = sum(w.stat().st_size for w in wheels) / 1e6
unpacked = sum(i.file_size for w in wheels for i in zipfile.ZipFile(w).infolist()) / 1e6
lock = pathlib.Path(sys.argv[2])
lock.write_text(f"# first run: downloads about {download:.0f} MB of Python packages ({unpacked:.0f} MB unpacked), "
                "Postgres and the embedding model among them, and nothing later.\n" + lock.read_text())
endef
export SIZES

-include compose/targets.mk ops/targets.mk tests/vm/targets.mk
