# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON := .venv/bin/python

.PHONY: demo test docs docs-check dist test-gpu test-integrations format

# A second thread gains little on images this small, and beside other work it loses much.
demo: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/surrogap compare --out runs/demo

test: .venv/installed
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy src
	$(PYTHON) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# The site, in build/docs; `make test` builds it too.
docs: .venv/installed
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

# Every page in headless Chromium (Debian: apt-get install chromium), wide and narrow.
docs-check: docs
	$(PYTHON) -m pip install --quiet --editable '.[dev,browser]'
	$(PYTHON) docs/browse.py build/docs --record results/docs_check.txt

# Wheel and sdist in dist/. The sdist builds the wheel, byte for byte, and its own tests run;
# DIST_TESTS=tests/core runs some of them.
dist: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[dev,dist]'
	rm -rf dist build/wheel build/sdist
	$(PYTHON) -m build --outdir dist
	$(PYTHON) -m build --wheel --outdir build/wheel
	cmp dist/*.whl build/wheel/*.whl
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) -m pytest tests/test_package.py -m dist
	mkdir -p build/sdist && tar -xzf dist/*.tar.gz --strip-components 1 -C build/sdist
	cd build/sdist && PYTHONPATH=$(CURDIR)/build/sdist/src $(CURDIR)/$(PYTHON) -m pytest $(DIST_TESTS) \
	    --numprocesses auto --maxprocesses 4 --dist worksteal

# On a machine with a GPU and torch in its own Python; the last run is in results/gpu_tests.txt.
test-gpu:
	PYTHONPATH="src:$$PYTHONPATH" python3 -m pytest tests -m gpu

# TRL, compiled models and two processes; the last run is in results/integrations.txt.
test-integrations: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[dev,integrations]'
	$(PYTHON) -m pytest tests/integrations -m integrations

format: .venv/installed
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

.venv/installed: pyproject.toml
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	touch $@
