# What one does with a checkout. Each target installs what it lacks and does nothing twice.
PREFIX ?= /opt/belljar
EXTRAS ?=

.PHONY: help demo test test-all quick live test-batch torture lint bench docs packages install uninstall clean

help:
	@echo 'make demo       a real job in a real virtual machine, host and guest compared, seconds per phase'
	@echo 'make test       all tests: lint, types, unit, contracts, stories, then real machines'
	@echo 'make test-all   those and all slow ones (hours): stock images, other releases of Debian with their QEMUs and daemons'
	@echo 'make quick      the tests that boot nothing (seconds)'
	@echo 'make live       the tests that boot real machines (minutes)'
	@echo 'make test-batch every test under real batch systems (an hour): Slurm, Grid Engine, stand-ins for the others'
	@echo 'make torture    jobs killed at random under Slurm and Grid Engine, BELLJAR_KILLS=500 each, a soak of BELLJAR_SOAK=20000'
	@echo 'make lint       ruff and mypy alone'
	@echo 'make bench      the benchmarks'
	@echo 'make docs       the site of the documents, in build/site'
	@echo 'make packages   wheel, sdist, deb, rpm and tarball into dist/, checked by lintian and rpmlint'
	@echo 'make install    as root: into PREFIX ($(PREFIX)), with a link in /usr/local/bin'
	@echo 'make uninstall  as root: take it away again; what stays is listed, and goes with PURGE=1'
	@echo 'make clean      remove what the other targets made here'

demo:
	@scripts/prepare
	@.venv/bin/python scripts/demo

test:
	@scripts/prepare dev
	@scripts/test

test-all:
	@scripts/prepare dev
	@scripts/test all-slow

quick:
	@scripts/prepare dev
	@scripts/test quick

live:
	@scripts/prepare dev
	@scripts/test live

test-batch:
	@scripts/prepare dev
	@scripts/test batch

torture:
	@scripts/prepare dev
	@scripts/test torture

lint:
	@scripts/prepare dev
	@.venv/bin/python -m pytest tests/rules/test_house_rules.py -k 'types or lint or format'

bench:
	@scripts/prepare dev
	@.venv/bin/python bench/start.py
	@.venv/bin/python bench/decide.py
	@.venv/bin/python bench/own.py
	@.venv/bin/python bench/stream.py
	@.venv/bin/python bench/density.py
	@.venv/bin/python bench/launch.py
	@.venv/bin/python bench/throughput.py
	@.venv/bin/python bench/batch.py
	@.venv/bin/python bench/bait.py
	@.venv/bin/python bench/executor.py
	@.venv/bin/python bench/contexts.py --contexts ramdisk
	@.venv/bin/python bench/data.py --files 500
	@.venv/bin/python bench/images.py
	@.venv/bin/python bench/fork.py
	@.venv/bin/python bench/lease.py
	@.venv/bin/python bench/libvirt.py
	@.venv/bin/python bench/networks.py
	@.venv/bin/python bench/sandbox.py
	@.venv/bin/python bench/vacuum.py

docs:
	@scripts/prepare dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo 'build/site/index.html'

packages:
	@scripts/packages all

install:
	@scripts/prepare
	@scripts/install '$(PREFIX)' '$(EXTRAS)'

uninstall:
	@scripts/install --remove '$(PREFIX)' '$(if $(PURGE),--purge)'

clean:
	rm -rf .venv /var/tmp/belljar-test-$$(id -u) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests scripts bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
