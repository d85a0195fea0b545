# The project's commands. Each makes what it needs; a second run starts from what is there. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
VENV_NEXT ?= .venv-next
VENV_AOT ?= .venv-aot
CACHE ?= .cache
MODEL ?=
# The jax that is tested first; `make test-next` takes the newest that setup.cfg allows.
JAX ?= jax==0.11.2
WORKERS ?= 2

# Byte code is made as modules are first imported: most of what is installed never is.
PIP_FLAGS := -qq --disable-pip-version-check --no-input --no-compile

# Without an NVIDIA GPU jax must not look for one, whatever wheels are installed.
ifeq ($(wildcard /dev/nvidia0),)
export JAX_PLATFORMS ?= cpu
endif

# Prints the first interpreter of at least 3.12 that can make virtual environments.
define FIND_PYTHON
find_python() { \
  local p; \
  for p in $${PYTHON:-} python3.14 python3.13 python3.12 python3 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python; do \
    if "$$p" -c 'import sys, sysconfig, venv, ensurepip; \
sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1; then \
      echo "$$p"; return; \
    fi; \
  done; \
  echo 'make: no Python >= 3.12 with venv and pip (ensurepip) was found: not on PATH as python3.14, python3.13, python3.12, python3 or' >&2; \
  echo "python, nor under $${PYENV_ROOT:-$$HOME/.pyenv}/versions. Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv;" >&2; \
  echo "pyenv: pyenv install 3.12), or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
  return 1; \
}
endef

.PHONY: help
help:
	@echo 'make demo                 convert the default checkpoint (SmolLM2-135M-Instruct, 90 MB, downloaded once) and generate text'
	@echo 'make demo MODEL=PATH      the same with a .gguf file, a Hugging Face folder or a converted folder'
	@echo 'make test                 ruff, mypy and all tests, on $(JAX)'
	@echo 'make test-next            the same on the newest jax that setup.cfg allows'
	@echo 'make aot                  compile kernels and whole steps for A100 and H200 without a GPU, and check their budgets'
	@echo 'make clean                remove the virtual environments and the tools'"'"' caches; the downloaded checkpoint stays'
	@echo 'Settings: PYTHON=interpreter  VENV=folder  CACHE=folder for checkpoints  JAX=requirement  WORKERS=test processes'

.PHONY: demo
demo: $(VENV)/.runtime
	@$(VENV)/bin/python -m jaxinfer.demo --cache_dir='$(CACHE)' --model='$(MODEL)'

.PHONY: test
test: $(VENV)/.test
	@$(MAKE) --no-print-directory check BIN='$(VENV)/bin'

.PHONY: test-next
test-next: $(VENV_NEXT)/.test
	@$(MAKE) --no-print-directory check BIN='$(VENV_NEXT)/bin'

# JAX_PLATFORMS is bench.aot's own affair: it compiles for GPUs that are not here.
.PHONY: aot
aot: $(VENV_AOT)/.aot
	@$(VENV_AOT)/bin/python -m bench.aot

# Ruff, mypy and the tests with the tools under BIN.
.PHONY: check
check:
	@$(BIN)/python -c 'import sys, jax; print("python", sys.version.split()[0], "jax", jax.__version__)'
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS)

.PHONY: clean
clean:
	rm -rf '$(VENV)' '$(VENV_NEXT)' '$(VENV_AOT)' .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# A stamp is made last, so an interrupted step is done again. An environment without its stamp is made afresh.
$(VENV)/.made $(VENV_NEXT)/.made $(VENV_AOT)/.made:
	@$(FIND_PYTHON); python=$$(find_python); \
	echo "Making the virtual environment $(@D) with $$python ($$("$$python" -c 'import sys; print(sys.version.split()[0])'))"; \
	"$$python" -m venv --clear '$(@D)'
	@touch '$@'

$(VENV)/.runtime: $(VENV)/.made setup.cfg pyproject.toml
	@echo 'Installing jaxinfer and what it runs on into $(@D) (once, about a minute)'
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e . '$(JAX)'
	@touch '$@'

$(VENV)/.test: $(VENV)/.runtime
	@echo 'Installing what the tests need into $(@D) (once)'
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[test]' '$(JAX)'
	@touch '$@'

$(VENV_NEXT)/.test: $(VENV_NEXT)/.made setup.cfg pyproject.toml
	@echo 'Installing jaxinfer, its tests and the newest jax allowed into $(@D) (once, about a minute)'
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager -e '.[test]'
	@touch '$@'

$(VENV_AOT)/.aot: $(VENV_AOT)/.made setup.cfg pyproject.toml
	@echo 'Installing jaxinfer and the CUDA wheels of jax, which compile without a GPU, into $(@D) (once, 4 GB)'
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[cuda13]' '$(JAX)'
	@touch '$@'
