# One command per action, the same on a laptop and in continuous integration.

PYTHON ?= python3
BIN := .venv/bin
# Python compiles what it imports; compiling everything that is installed would double the time.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Some machines forbid it: then every one of the many processes of the tests compiles torch again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles its CPU kernels with ninja, which it looks up on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup operators demo labs notebooks lessons predictions scenarios docs test test-machines \
	newest wheel check format schema lock clean

## setup: create .venv with everything pinned in constraints.txt
setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwise needs Python 3.11 or newer; try: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools wheel
	$(PIP) torch numpy packaging psutil py-cpuinfo ninja hjson
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	$(PIP) --editable '.[train,dev]'
	touch $@

## operators: compile what DeepSpeed offloads optimizers with, in a minute or two; the tests share it
operators: .venv/.operators

.venv/.operators: .venv/.ready
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions $(BIN)/python -c \
		'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()'
	touch $@

## demo: train a small model on the packaged text, report on it, let it write
demo: setup
	$(BIN)/shardwise demo

## labs: run every notebook in a kernel of its own; pages with outputs in build/labs. LABS=01-setup runs one
labs: .venv/.labs operators
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions $(BIN)/python labs/notebooks.py execute $(LABS)

.venv/.labs: .venv/.ready
	$(PIP) --editable '.[labs]'
	touch $@

## notebooks: write labs/*.ipynb again after a change of labs/*.py
notebooks:
	$(PYTHON) labs/notebooks.py write

## lessons: run the commands of the lessons again and write what they print; LESSONS=02-zero runs one
lessons: setup
	$(BIN)/python docs/lessons/run.py $(LESSONS)

## predictions: write all that is predicted and shown again, after a change of predictions; needs no GPU, takes
## half an hour
PREDICTIONS := accuracy/evidence accuracy/page published/published published/published_page scaling/scaling \
	groups/group_sizes tensor_parallel/autotp
predictions: setup
	for script in $(PREDICTIONS); do PYTHONHASHSEED=0 $(BIN)/python benchmarks/$$script.py || exit 1; done
	$(BIN)/python benchmarks/power_limits_predicted/jobs.py --out benchmarks/power_limits_predicted/results/jobs.json
	$(BIN)/python docs/fill_tables.py
	$(BIN)/python docs/lessons/run.py
	$(BIN)/python docs/scenarios.py

## scenarios: run the commands of docs/scenarios.md, minutes, and look for what the page says they print
scenarios: setup
	$(BIN)/python docs/scenarios.py

## docs: compare the lessons with what their commands print, build the site in build/site, check its links
docs: setup .venv-docs/.ready
	$(BIN)/python docs/lessons/run.py --check
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --no-compile --requirement docs/requirements.txt
	touch $@

## test: everything that needs no GPU. One queue of files, the longest first; a worker more than there are
## cores, as tests in tests/distributed often wait for the processes that they start
test: setup operators
	$(BIN)/python -m pytest -m 'not gpu' --numprocesses $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder \
		tests/distributed tests/golden tests/unit

## test-machines: several machines, as network namespaces and in Slurm; needs root, takes some ten minutes
test-machines: setup operators
	$(BIN)/python -m pytest tests/machines

## newest: test with the newest releases, without pins, in .venv-newest; by hand or on a schedule, not in CI.
## NEWEST_TESTS="tests/unit/test_patch.py tests/unit/engines" is the part that finds most, in minutes
NEWEST := .venv-newest/bin/python
NEWEST_TESTS ?= tests/unit/test_patch.py tests/unit/engines tests/unit tests/distributed/test_patches.py
newest:
	$(PYTHON) -m venv --clear .venv-newest
	$(NEWEST) -m pip install --quiet setuptools wheel torch numpy packaging psutil py-cpuinfo ninja hjson
	DS_BUILD_OPS=0 $(NEWEST) -m pip install --quiet --no-build-isolation deepspeed
	$(NEWEST) -m pip install --quiet --upgrade-strategy eager --upgrade --editable '.[dev]' transformers peft \
		bitsandbytes liger-kernel nvidia-ml-py
	@echo "pinned:"; grep -E '^(torch|transformers|deepspeed|peft)==' constraints.txt
	@echo "newest:"; $(NEWEST) -m pip list --format freeze | grep -E '^(torch|transformers|deepspeed|peft)=='
	PATH="$(CURDIR)/.venv-newest/bin:$$PATH" $(NEWEST) -m pytest -m 'not gpu' --numprocesses logical --tb line $(NEWEST_TESTS)

## wheel: build wheel and sdist, install them in clean environments of three Pythons, run them; needs uv
wheel:
	$(PYTHON) benchmarks/install/try.py

## check: lint, format, types, import contracts
check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

## format: apply ruff's fixes and format
format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

## schema: write the job file's JSON Schema again after a change of job/schema.py
schema: setup
	$(BIN)/python -m shardwise.job.json_schema > docs/job.schema.json

## lock: pin what is installed now
lock: setup .venv/.labs
	$(BIN)/python -m pip list --format freeze --exclude-editable --exclude pip \
		| grep -vi '^nvidia-\|^cuda-\|^shardwise' | sed 's/+[a-z0-9.]*$$//' > constraints.new
	{ sed -n '/^#/p' constraints.txt; cat constraints.new; } > constraints.tmp
	rm constraints.new
	mv constraints.tmp constraints.txt

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
