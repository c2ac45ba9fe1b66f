# make demo and make test set themselves up; everything else is for development.
PYTHON ?= python3
PIP = pip --disable-pip-version-check -q install

# A new or removed module changes its folder's time stamp, and the strict editable install must then be made again.
FOLDERS := $(shell find core callbacks integrations -type d -not -name __pycache__)

# What touches fsspec, s3fs or botocore, and Composer's callback as far as it writes and reads by them.
LLMFOUNDRY_TESTS = --ignore=tests/core/store/striped tests/core/store tests/core/cli/test_cli_runs.py \
  $(addprefix tests/callbacks/test_composer_, callback.py continuing.py foundry.py)

# What asks little of torch: the coders' bytes are checked there by the golden files and by runs under both versions.
NOT_ON_NEWEST = $(addprefix --ignore=tests/, campaigns examples test_documents.py test_words.py test_imports_drawing.py test_docstrings.py \
  test_options_page.py $(addprefix callbacks/test_, callbacks_stores.py lightning_best.py transformers_best.py) \
  $(addprefix core/, entropy schemes store cli container coding quantize engine runtime quality io test_optional_parts.py \
  $(addprefix sharded/test_, probing.py shared_options.py sharded_adoption.py) \
  $(addprefix session/test_, adapted_copies.py other_data.py probe.py replicated_log.py stateful_loader.py trained.py)))

.PHONY: demo demo-stores evidence wheels test test-newest test-llmfoundry test-slow lint imports docs format clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: .venv-demo/ready  ## train, kill -9, resume, and print what it cost (5 minutes)
	.venv-demo/bin/python examples/demo.py

demo-stores: .venv-demo/ready  ## the same in three stores, one of which is lost in the middle, and healed
	.venv-demo/bin/python examples/demo.py --stores

# Two peers are no dependency of ours: where they cannot be had, their rows are missing.
evidence: .venv/ready  ## every table of docs/results.md that takes no hours, with figures (3 hours; QUICK=1: 5 minutes)
	.venv/bin/shrinkpoint compile
	$(if $(QUICK),,-.venv/bin/$(PIP) zipnn==0.5.4 faiss-cpu==1.15.1)
	$(if $(QUICK),,-test -d build/excp || git clone -q --depth 1 https://github.com/Gaffey/ExCP build/excp)
	.venv/bin/python examples/benchmarks/evidence.py $(if $(QUICK),--quick)

# Of the commit, without what else lies here.
wheels: .venv/ready  ## a wheel for all platforms, and one with compiled coders for this platform and Python, in dist/ (2 minutes)
	rm -rf dist
	.venv/bin/python -m pip --disable-pip-version-check -q wheel --no-deps -w dist "git+file://$(CURDIR)"
	.venv/bin/python .ci/platform_wheel.py dist/*-none-any.whl

test: .venv/ready  ## the fast suite (20 minutes on 2 cores)
	.venv/bin/shrinkpoint compile
	.venv/bin/pytest -n 2 --dist worksteal

test-newest: .venv-newest/ready  ## on the newest torch, what asks something of it: frameworks, states, ranks, logs, loops; Composer's skip
	.venv-newest/bin/shrinkpoint compile
	.venv-newest/bin/pytest -n 2 --dist worksteal $(NOT_ON_NEWEST) $(UNTIL)

test-llmfoundry: .venv-llmfoundry/ready  ## stores and Composer beside the old fsspec and s3fs that llm-foundry pins
	.venv-llmfoundry/bin/python .venv/bin/pytest -n 2 --dist worksteal $(LLMFOUNDRY_TESTS)

test-slow: .venv/ready .venv-newest/ready  ## the campaigns and matrices too
	.venv/bin/pytest -n 2 --dist worksteal --run-slow

imports: .venv/ready  ## pages made from the code: docs/imports.svg, docs/options.md
	.venv/bin/python docs/imports.py
	.venv/bin/python docs/options.py

lint: .venv/ready  ## style, types, and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# Not --quiet: it hides the warnings from --strict, too.
docs: .venv-docs/ready  ## the site, in build/site; a broken link or a public name without docstring is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

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
	.venv/bin/$(PIP) -c constraints/dev.txt torch==2.7.0
	.venv/bin/$(PIP) -c constraints/dev.txt -e ".[dev]"
	touch $@

.venv-newest/ready: pyproject.toml constraints/newest.txt $(FOLDERS)
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/$(PIP) -c constraints/newest.txt torch==2.13.0
	.venv-newest/bin/$(PIP) -c constraints/newest.txt -e ".[test]"
	touch $@

# Eight packages in front of .venv's, which the .pth file appends to the path: the same torch, numpy and mosaicml without
# installing their 7 GB a second time. pip sees both, so its `check` and the printed versions tell which ones win.
.venv-llmfoundry/ready: .venv/ready constraints/llmfoundry.txt
	rm -rf .venv-llmfoundry
	.venv/bin/python -m venv .venv-llmfoundry
	.venv/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$(.venv-llmfoundry/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	.venv-llmfoundry/bin/$(PIP) -r constraints/llmfoundry.txt
	.venv-llmfoundry/bin/$(PIP) --no-deps -e .
	.venv-llmfoundry/bin/python -m pip check
	touch $@

# Without torch: mkdocstrings reads sources. The editable install is where it finds them under their import name.
.venv-docs/ready: pyproject.toml constraints/docs.txt $(FOLDERS)
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(PIP) -r constraints/docs.txt
	.venv-docs/bin/$(PIP) --no-deps -e .
	touch $@

clean:  ## remove everything that can be made again
	rm -rf .venv .venv-demo .venv-docs .venv-newest .venv-llmfoundry build demo-out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
