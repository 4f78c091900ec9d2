# `make demo` and `make test` do everything, set-up included. Python 3.12 comes from .python-version (pyenv)
# or from uv; where there is only 3.13, that is taken. The set-up runs again only when the lock or pyproject.toml changed.

SHELL := /bin/bash
READY := .venv/.ready
PY := .venv/bin/python
UV := .venv/bin/uv
IS_OURS := import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))

export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=  # pytest keeps what it makes of test files for the next time

.PHONY: compiled demo demo-rl golden test test-unit test-long test-oldest test-soak test-all lint docs setup lock clean

# FAMILY is a model_type of `supported.SUPPORTED`, such as qwen3_vl. With ADAPTER=lora, a model that knows five
# digits learns the others by adapters. With FAMILY=compose, a tower and a language model become a model. With
# TASK=boxes, a model learns to say where a digit is.
demo: export FAMILY ?= $(if $(TASK),qwen3_vl,gemma3)
demo: export ADAPTER ?=
demo: export TASK ?=
demo: compiled
	@$(PY) examples/digits/$(if $(TASK),boxes_demo,$(if $(ADAPTER),adapter_demo,$(if $(filter compose,$(FAMILY)),compose_demo,demo))).py

# A model that was told few digits learns the others from rewards, by STEPS of GRPO.
demo-rl: export FAMILY ?= gemma3
demo-rl: export STEPS ?=
demo-rl: compiled
	@$(PY) examples/digits/rl_demo.py

# Some tests wait, so three keep two processors busy. tests/costs.py says in which order files are begun.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

# Functions and classes alone: no ranks, no commands.
test-unit: compiled
	@HF_HUB_OFFLINE=1 $(PY) -m pytest $(WORKERS) -m "not long and not soak" tests/unit

test: compiled
	@HF_HUB_OFFLINE=1 $(PY) -m pytest $(WORKERS) -m "not long and not soak"

# Parity, resume, weights and packing in pairs of their factors, and some whole runs (docs/design/tests.md).
test-long: compiled
	@HF_HUB_OFFLINE=1 $(PY) -m pytest $(WORKERS) -m "long and not soak"

# Every family, variant and combination, many more samples, kills and interruptions: hours, every night.
test-soak: compiled
	@HF_HUB_OFFLINE=1 $(PY) -m pytest -m soak

# The oldest torch and Transformers that pyproject.toml allows, over the other packages: kernels, towers, a
# rehearsal, a run that resumes and an export. The whole of `make test` with FILES=tests. Once they are there,
# `make test-soak` also compares them with the newest.
FILES ?= tests/unit/core/test_attention.py tests/unit/core/test_fused.py tests/unit/models/test_towers.py \
	tests/parity/core/test_rehearsal.py \
	tests/e2e/test_packing_run.py::test_a_packed_run_resumes_as_if_it_had_not_stopped \
	tests/e2e/test_convert.py::test_an_export_of_an_import_has_the_logits_of_the_source \
	tests/e2e/test_convert.py::test_a_run_has_the_logits_of_its_export
test-oldest: compiled .venv/torch-2.11
	@HF_HUB_OFFLINE=1 PYTHONPATH=.venv/torch-2.11 $(PY) -m pytest $(WORKERS) -m "not long and not soak" $(FILES)

.venv/torch-2.11: requirements-torch-2.11.lock | $(READY)
	@echo "fetching torch 2.11 and Transformers 5.17"
	@rm -rf $@
	@$(UV) pip install --system-certs --quiet --python $(PY) --no-deps --require-hashes --target $@ -r $<
	@touch $@

test-all: test test-long

# What tests/parity/core/test_golden.py compares, written again after a change that is meant.
golden: compiled
	@HF_HUB_OFFLINE=1 $(PY) tools/golden.py

lint: $(READY)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@$(PY) tools/tables.py --check
	@$(PY) tools/configs.py --check
	@$(PY) tools/reference.py --check
	@$(PY) tools/check_sentences.py

# The pages as a site in build/site, with links and anchors checked. To read it with its search:
# .venv/bin/python -m http.server -d build/site
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)
	@$(PY) -m mkdocs build --strict

# Every process that a test starts imports the package, also where PYTHONDONTWRITEBYTECODE is set.
compiled: $(READY)
	@$(PY) -m compileall -q src tiny tests

setup: $(READY)

$(READY): requirements.lock pyproject.toml .python-version | $(PY)
	@echo "installing the locked packages into .venv"
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	@$(UV) pip sync --system-certs --quiet --compile-bytecode --python $(PY) --require-hashes requirements.lock
	@$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

$(PY):
	@for python in python3.12 python3.13 python3 python; do \
		if $$python -c '$(IS_OURS)' 2>/dev/null; then exec $$python -m venv .venv; fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --quiet --seed --python 3.12 .venv; fi; \
	echo "no Python 3.12 or 3.13 found; install one, for instance with: pyenv install 3.12" >&2; exit 1

COMPILE = $(UV) pip compile --upgrade --generate-hashes --python $(PY) \
	--python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links --quiet
# torchvision, triton and setuptools are those that torch 2.11 asks for; its NVIDIA libraries are torch's own, but one.
# Transformers 5.17, the oldest that is allowed, asks for huggingface-hub 1, and that for httpx.
TORCH := torch==2.11.0 torchvision==0.26.0 triton==3.6.0 nvidia-curand==10.4.0.35 setuptools==81.0.0 \
	transformers==5.17.0 tokenizers==0.23.3 huggingface-hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.18

# What the extra `gpu` brings beside the locked packages, for tools/bundle.py.
GPU := flash-linear-attention fla-core einops

# The newest versions that pyproject.toml allows, with hashes and without index addresses; and the oldest.
lock: $(READY)
	@$(COMPILE) pyproject.toml --extra dev --output-file requirements.lock
	@printf '%s\n' $(TORCH) | $(COMPILE) - --no-deps --output-file requirements-torch-2.11.lock
	@printf '%s\n' $(GPU) | $(COMPILE) - --no-deps --output-file requirements-gpu.lock

clean:
	rm -rf .venv runs build dist .pytest_cache .ruff_cache src/*.egg-info
	find src tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
