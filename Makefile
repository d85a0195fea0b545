# The project's commands. Each makes what it needs; a second run starts from what is there. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
VENV_NEXT ?= .venv-next
VENV_AOT ?= .venv-aot
VENV_GPU ?= .venv-gpu
CACHE ?= .cache
MODEL ?=
# The jax that is tested first; `make test-next` takes the newest that setup.cfg allows.
JAX ?= jax==0.11.2
WORKERS ?= 2
# An interpreter that has all that the tests on a GPU need, where none is to be installed; and processes that share the GPU, if several.
GPU_PYTHON ?=
GPU_WORKERS ?=

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
	@echo 'make gpu-test             kernel and engine tests on the GPU of this machine, the kernels also on the path that an A100 takes'
	@echo '                          (GPU_PYTHON=python3 takes that interpreter as it is, instead of installing into $(VENV_GPU))'
	@echo 'make gpu-sanitize         small cases of the kernels under compute-sanitizer: memory accesses, then races in shared memory'
	@echo 'make gpu-bench            time the kernels beside their peers (BENCH_OPS=norm,int4 takes a part), in minutes; files go to bench/results'
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

# The suites natively on whatever GPU is attached; on one newer than sm_80 the kernels again as they are lowered for sm_80.
.PHONY: gpu-test
gpu-test: gpu-attached $(if $(GPU_PYTHON),,$(VENV_GPU)/.gpu)
	@$(MAKE) --no-print-directory gpu-check PYTHON_HERE='$(or $(GPU_PYTHON),$(VENV_GPU)/bin/python)'

.PHONY: gpu-attached
gpu-attached:
	@compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/dxg ] || { \
	  echo 'make: no NVIDIA GPU is attached to this machine (no /dev/nvidia0): run it on one; make test needs none' >&2; exit 1; }

# Asks jax itself, which may lack the wheels for a GPU that is there. test_goldens.py converts, which needs gguf.
.PHONY: gpu-check
gpu-check: export JAX_PLATFORMS := cuda,cpu
gpu-check: export XLA_PYTHON_CLIENT_PREALLOCATE := false
gpu-check: PYTEST := $(PYTHON_HERE) -m pytest -q -p no:cacheprovider $(if $(GPU_WORKERS),-n $(GPU_WORKERS))
gpu-check:
	@capability=$$($(PYTHON_HERE) -c 'import jax; print(jax.devices("cuda")[0].compute_capability)') || { \
	  echo 'make gpu-test: jax of $(PYTHON_HERE) finds no GPU (its message is above): it needs the wheels of jax[cuda13] or jax[cuda12]' >&2; \
	  exit 1; }; \
	goldens=tests/models/test_goldens.py; \
	$(PYTHON_HERE) -c 'import gguf' 2>/dev/null || { echo "Left out: $$goldens converts checkpoints and needs the gguf package"; goldens=; }; \
	echo "Tests on a GPU of compute capability $$capability"; \
	failed=; trap 'exit 130' INT; \
	$(PYTEST) tests/pallas_kernels tests/engine $$goldens || failed=1; \
	if [ "$$capability" != 8.0 ]; then \
	  echo 'The kernels again, on the path that sm_80 takes'; \
	  JAXINFER_TEST_ARCH=80 $(PYTEST) tests/pallas_kernels || failed=1; \
	fi; \
	[ -z "$$failed" ]

# Small cases of our own kernels, natively: under the sanitizer one takes many times as long. A process a file, so that what ends one ends
# no other; pytest leaves with 5 where a file has no such case.
SANITIZE ?= (mosaic or wgmma or stream or dequantize) and (int8_zeros or bf16_lengths or one_token or tail_of_n or group32 or tail_of_m \
  or decode_bf16_gqa7 or prefill_bf16_odd or mixed_bf16_gqa3 or bf16_h128_gqa3 or bf16_residual or bf16_parts or decode_bf16 \
  or prefill_bf16_page16 or prefill_f16 or decode_h128 or any_tiles)
SANITIZERS ?= memcheck racecheck
# Time of a file, after which it ends itself and says where it stood: under the sanitizer a kernel may hang without a word. What does not even
# end itself is killed 20 s later; its output goes to a file, for a pipe would wait for whoever still holds it.
SANITIZE_SECONDS ?= 240
.PHONY: gpu-sanitize
gpu-sanitize: export JAX_PLATFORMS := cuda,cpu
gpu-sanitize: export XLA_PYTHON_CLIENT_PREALLOCATE := false
gpu-sanitize: export SANITIZED := $(or $(GPU_PYTHON),$(VENV_GPU)/bin/python) -c 'import faulthandler, os, pytest, sys; \
  faulthandler.dump_traceback_later($(SANITIZE_SECONDS), exit=True, file=os.fdopen(os.dup(2), "w")); sys.exit(pytest.main(sys.argv[1:]))' \
  -v -p no:cacheprovider -k '$(SANITIZE)'
gpu-sanitize: gpu-attached $(if $(GPU_PYTHON),,$(VENV_GPU)/.gpu)
	@command -v compute-sanitizer >/dev/null || { echo 'make gpu-sanitize: compute-sanitizer, of the CUDA toolkit, is not on PATH' >&2; exit 1; }
	@failed=; for arch in '' 80; do for tool in $(SANITIZERS); do \
	  echo "compute-sanitizer, $$tool$${arch:+, on the path that sm_80 takes}"; \
	  export JAXINFER_TEST_ARCH=$$arch TOOL=$$tool; \
	  ls tests/pallas_kernels/test_*.py | xargs -P $(or $(GPU_WORKERS),1) -I FILE bash -c \
	    'out=$$(mktemp); eval timeout -s KILL $$(($(SANITIZE_SECONDS) + 20)) compute-sanitizer --tool $$TOOL --error-exitcode 9 $$SANITIZED FILE \
	       >$$out 2>&1; code=$$?; if [ $$code = 5 ]; then exit 0; fi; if [ $$code != 0 ]; then cat $$out; fi; \
	     echo "FILE: $$(grep -E "^=.* (passed|failed|error)|SUMMARY|^Timeout" $$out | paste -sd\ ) (exit $$code)"; exit $$code' || failed=1; \
	done; done; [ -z "$$failed" ]

# What bench/results has of this GPU: kernels beside their peers, on one newer than sm_80 also on the path that an A100 takes. Half the cores
# share the rows, eight of them at most, for each takes memory of the GPU.
BENCH_OPS ?= decode,prefill,mixed,write,rotary,norm,int4
.PHONY: gpu-bench
gpu-bench: gpu-attached $(if $(GPU_PYTHON),,$(VENV_GPU)/.gpu)
	@python='$(or $(GPU_PYTHON),$(VENV_GPU)/bin/python)'; \
	capability=$$("$$python" -c 'import jax; print(jax.devices("cuda")[0].compute_capability)'); \
	half=$$((($$(nproc) + 1) / 2)); processes=$(or $(GPU_WORKERS),$$((half > 8 ? 8 : half))); \
	"$$python" -m bench.kernels --ops='$(BENCH_OPS)' --processes=$$processes; \
	if [ "$$capability" != 8.0 ]; then "$$python" -m bench.kernels --ops='$(BENCH_OPS)' --processes=$$processes --arch=80; fi

# Ruff, mypy and the tests with the tools under BIN.
.PHONY: check
check:
	@$(BIN)/python -c 'import sys, jax; print("python", sys.version.split()[0], "jax", jax.__version__)'
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: clean
clean:
	rm -rf '$(VENV)' '$(VENV_NEXT)' '$(VENV_AOT)' '$(VENV_GPU)' .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# A stamp is made last, so an interrupted step is done again. An environment without its stamp is made afresh.
$(VENV)/.made $(VENV_NEXT)/.made $(VENV_AOT)/.made $(VENV_GPU)/.made:
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

$(VENV_GPU)/.gpu: $(VENV_GPU)/.made setup.cfg pyproject.toml
	@echo 'Installing jaxinfer, its tests and the CUDA wheels of jax into $(@D) (once, 4 GB)'
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[cuda13,test]' '$(JAX)'
	@touch '$@'
