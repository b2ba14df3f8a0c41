# Foretell: `make chat` sets everything up and opens the chat, `make test` runs the tests.
# Without make: the commands below are plain, see CONTRIBUTING.md.

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
PYTHON ?= python
else
BIN := .venv/bin
PYTHON ?= python3
endif
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

.PHONY: chat test lint check check-native soak clean

chat: $(STAMP)
	@$(BIN)/foretell models path smollm2-135m >.venv/model-path 2>&1 </dev/null || \
		$(BIN)/foretell models pull smollm2-135m 1>&2 </dev/null
	@$(BIN)/foretell

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -q

lint: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

check-native: $(DEV_STAMP)
	$(BIN)/python -m tests.native.check

soak: $(DEV_STAMP)
	$(BIN)/python -m tests.soak

$(STAMP): pyproject.toml setup.py $(wildcard backends/native/src/*.[ch])
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . 1>&2
	@touch $(STAMP)

$(DEV_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" 1>&2
	@touch $(DEV_STAMP)

clean:
	rm -rf .venv build *.egg-info backends/native/_foretell*.so backends/native/_foretell*.pyd
