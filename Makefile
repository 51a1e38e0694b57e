# vllm-tokenswift: everything runs in a virtual environment of its own, .venv.
#
#   make demo       a real model writes a long text twice, plain and with TokenSwift
#   make test       the tests; 10 minutes on two cores
#   make test-fast  those that start no engine and take no seconds, for daily work
#   make quality    ruff, mypy and the drift tests
#   make bench      losslessness and speed on this machine, into benchmarks/results/
#   make drift-033  the signatures relied upon, against vLLM 0.33's wheel

VENV := .venv
# vLLM has wheels for these; the first one that runs is taken.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,\
            $(if $(shell $(p) --version 2>/dev/null),$(p))))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# No downloads of models, no statistics sent, little memory, and no wait for the GPU's
# or CPU's compiled kernels in tests.
ENGINE_ENV := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=2 \
              TOKENIZERS_PARALLELISM=false
TEST_ENV := $(ENGINE_ENV) VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING

.PHONY: venv model demo test test-fast quality bench drift-033 signatures readme clean

venv: $(INSTALLED)

$(INSTALLED): setup.py pyproject.toml vllm_tokenswift/versions.py scripts/install_vllm.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check packaging
	$(BIN)/python scripts/install_vllm.py
	touch $@

model: venv
	$(ENGINE_ENV) $(BIN)/vllm-tokenswift prepare-model

demo: model
	$(ENGINE_ENV) $(BIN)/python -m vllm_tokenswift.demo

test: model
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-fast: venv
	$(TEST_ENV) $(BIN)/python -m pytest -q -n auto tests/unit -m "not engine and not slow and not gpu"

quality: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/unit/patches

bench: model
	$(ENGINE_ENV) $(BIN)/python -m benchmarks.losslessness
	$(ENGINE_ENV) $(BIN)/python -m benchmarks.cpu_speed

# Downloads the wheel (300 MB) without its dependencies and reads its source.
drift-033: venv
	$(BIN)/python scripts/signatures.py --version 0.33.0 --check

signatures: venv
	$(BIN)/python scripts/signatures.py --version 0.32.0 --write
	$(BIN)/python scripts/signatures.py --version 0.33.0 --write

# What pages hold of other files: tables of options, the index of records, figures. Tests
# compare them.
readme: venv
	$(BIN)/python scripts/readme_options.py
	$(BIN)/python scripts/support_table.py
	$(BIN)/python scripts/layout.py
	$(BIN)/python -m benchmarks.index
	$(BIN)/python -m benchmarks.figures --write

clean:
	rm -rf $(VENV) build dist *.egg-info
