# Every target does its own set-up: the first one in a fresh clone makes .venv, later ones find it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench sanitize clean

# One thread for each of the two ranks: they fill two cores, and do not fight over them where there are no more.
demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python examples/train_gpt.py fit --config examples/zero3.yaml

# A file's tests stay in one process, where they share fixtures; files start in the order of the folders, slow ones first.
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks --update

sanitize: $(READY)
	$(BIN)/python -m tests.native.sanitize

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Written last, so an interrupted installation starts over.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard lightning_zero/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than 3.10: name another one, make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test,dev]'
	@touch $@
