# pve-gpu-release. On a fresh Debian machine, as root: `make demo` shows the main job, `make test` passes the tests.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SUITE ?= bookworm

.PHONY: help setup demo test unit integration lint e2e e2e-smoke bench deb clean
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo        the story of the README, played in an embedded node with a stand-in GPU (needs root)
demo: setup
	@$(PY) -m tests.demo

## make test        lint, types, unit and integration tests (needs root)
test: lint unit integration

## make unit        the tests that need nothing but Python (those marked root run when you are)
unit: setup
	$(PY) -m pytest -q tests/unit

## make integration the tests in the embedded node: real processes, namespaces, cgroups; the GPU is a stand-in
integration: setup
	PGR_REQUIRE_EMBEDDED=1 $(PY) -m pytest -q tests/embedded tests/integration

lint: setup
	$(VENV)/bin/ruff check hostd tests
	$(VENV)/bin/mypy

## make e2e         the .deb, installed in a whole Proxmox-like node with systemd and LXC; SUITE=bookworm or trixie
e2e: setup
	bash tools/setup.sh --node
	PGR_REQUIRE_NODE=1 PGR_SUITE=$(SUITE) $(PY) -m pytest -q tests/node tests/package

e2e-smoke: setup
	bash tools/setup.sh --node
	PGR_REQUIRE_NODE=1 PGR_SUITE=$(SUITE) $(PY) -m pytest -q tests/node tests/package -m smoke

## make bench       speed beside fuser, lsof and a bare python3 (no assertions)
bench: setup
	@$(PY) -m tests.bench

## make bench-package   start-up of the installed package in nodes of Debian 12 and 13 (needs root)
bench-package: setup
	@$(PY) -m tests.bench_package

## make deb         the Debian package, built in clean trees of Debian 12 and 13, into build/deb/ (needs root)
deb:
	packaging/build-deb --lintian

setup: $(VENV)/.ready
$(VENV)/.ready: tools/setup.sh pyproject.toml
	@PYTHON=$(PYTHON) bash tools/setup.sh

clean:
	rm -rf $(VENV) .build build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
