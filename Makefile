# Everything runs in .venv, which each target sets up by itself; `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start hundreds of Pythons: byte code is kept, whatever the caller does in its own programs.
unexport PYTHONDONTWRITEBYTECODE
# A file stays with one worker, so that its models and swarms are made once; whole files go to whoever is free, in the order of tests/conftest.py.
BY_FILE := -n auto --dist loadfile --no-loadscope-reorder
# These only compute. Tests with real processes have their own turn: they wait for each other and for real time-outs, and need a core that is free.
COMPUTING := tests/parity tests/fuzz tests/chaos/test_simulation.py tests/chaos/test_membership.py tests/chaos/test_reconnects.py
REAL_PROCESSES := tests $(addprefix --ignore=,tests/unit $(COMPUTING))

.PHONY: demo test test-long long-rest long-membership check lint kernels format bench clean

.venv/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --build-constraint constraints.txt --editable '.[cpu]'
	touch $@

# Without compiling: most of what these packages bring is never imported, and what is gets compiled then.
.venv/test.stamp: .venv/run.stamp
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --build-constraint constraints.txt --editable '.[cpu,test]'
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
	$(BIN)/pytest $(BY_FILE) $(COMPUTING)
	$(BIN)/pytest $(BY_FILE) $(REAL_PROCESSES)

# A thousand nodes for an hour are simulated by one process beside all the rest: an hour and a half of one core, so its priority is only a little lower.
test-long: .venv/system.stamp
	$(MAKE) --jobs=2 lint kernels
	$(MAKE) --jobs=2 long-membership long-rest

long-rest: .venv/test.stamp .venv/system.stamp
	POTLUCK_LONG=1 $(BIN)/pytest -n auto tests/unit
	POTLUCK_LONG=1 $(BIN)/pytest $(BY_FILE) $(filter-out tests/chaos/test_membership.py,$(COMPUTING))
	POTLUCK_LONG=1 $(BIN)/pytest $(BY_FILE) $(REAL_PROCESSES)

long-membership: .venv/test.stamp
	POTLUCK_LONG=1 nice -n 5 $(BIN)/pytest -rP tests/chaos/test_membership.py

check:
	$(MAKE) --jobs=2 lint kernels
	$(BIN)/pytest -n auto tests/unit

lint: .venv/test.stamp
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

# On all cores, while packages are installed and mypy runs; left to the tests, their workers would wait for each other's kernels.
kernels: .venv/run.stamp
	PYTHONPATH=$(CURDIR)/src $(BIN)/python -m tests.support.all_kernels  # pip may be about to replace the link to it

format: .venv/test.stamp
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

bench: .venv/test.stamp
	$(BIN)/potluck bench engine --against llama.cpp

clean:
	rm -rf .venv build dist
