# Everything runs in .venv, which each target sets up by itself; `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# These only compute, so that every core can have some; tests with real processes have the machine to themselves.
SIDE_BY_SIDE := tests/parity tests/fuzz tests/chaos/test_simulation.py tests/chaos/test_membership.py

.PHONY: demo test test-long check format bench clean

.venv/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu,test]'
	touch $@

# Browser tests need Chromium, tests with several hosts need `ip`. Whoever may install them does; elsewhere those tests skip loudly.
.venv/system.stamp: .venv/run.stamp
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v chromium && command -v ip; } >/dev/null; then \
		echo "installing chromium and iproute2 for the browser and namespace tests"; \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium iproute2 >/dev/null; } \
			|| echo "could not install them; those tests will skip"; \
	fi
	touch $@

demo: .venv/run.stamp
	$(BIN)/potluck pull smollm2-135m
	$(BIN)/potluck ask "What is a potluck dinner? Answer in two sentences."
	$(BIN)/potluck demo

test: check .venv/system.stamp
	$(BIN)/pytest -n auto $(SIDE_BY_SIDE)
	$(BIN)/pytest --ignore=tests/unit $(addprefix --ignore=,$(SIDE_BY_SIDE))

test-long: check .venv/system.stamp
	POTLUCK_LONG=1 $(BIN)/pytest -n auto tests/unit $(SIDE_BY_SIDE)
	POTLUCK_LONG=1 $(BIN)/pytest --ignore=tests/unit $(addprefix --ignore=,$(SIDE_BY_SIDE))

check: .venv/test.stamp
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --ignore=tests/unit/cli tests/unit
	$(BIN)/pytest tests/unit/cli

format: .venv/test.stamp
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

bench: .venv/test.stamp
	$(BIN)/potluck bench engine --against llama.cpp

clean:
	rm -rf .venv build dist
