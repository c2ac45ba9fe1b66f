# make demo and make test set themselves up; everything else is for development.
PYTHON ?= python3
PIP = pip --disable-pip-version-check -q install

# A new or removed module changes its folder's time stamp, and the strict editable install must then be made again.
FOLDERS := $(shell find core callbacks integrations -type d -not -name __pycache__)

.PHONY: demo test test-slow lint format types clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: .venv-demo/ready  ## train, kill -9, resume, and print what it cost (5 minutes)
	.venv-demo/bin/python examples/demo.py

test: .venv/ready  ## the fast suite (under 10 minutes on 2 cores)
	.venv/bin/pytest -n 2 --dist worksteal

test-slow: .venv/ready  ## the campaigns and matrices too
	.venv/bin/pytest -n 2 --dist worksteal --run-slow

lint: .venv/ready  ## style, types, and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/ready  ## let ruff rewrite the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# torch is asked for by its exact version, first and alone, so that a machine that offers a CPU build takes it.
.venv-demo/ready: pyproject.toml constraints/demo.txt $(FOLDERS)
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	.venv-demo/bin/$(PIP) -c constraints/demo.txt torch==2.13.0
	.venv-demo/bin/$(PIP) -c constraints/demo.txt lightning
	.venv-demo/bin/$(PIP) -c constraints/demo.txt -e .
	touch $@

.venv/ready: pyproject.toml constraints/dev.txt $(FOLDERS)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/$(PIP) -c constraints/dev.txt torch==2.13.0
	.venv/bin/$(PIP) -c constraints/dev.txt -e ".[dev]"
	touch $@

clean:  ## remove everything that can be made again
	rm -rf .venv .venv-demo build demo-out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
