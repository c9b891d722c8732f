# `make demo` and `make test` do all their own set-up: python3, make and a C++ compiler suffice.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TEST_WORKERS ?= auto
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_SAVES ?= 1000
GPU_PYTHON ?= python3
GPU_BENCH_ARGS ?=
SANITIZER ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(PIP_ARGS)

NATIVE_SOURCES := $(shell find native -type f)
PYTHON_SOURCES := dcp_datastates tests integration benchmarks

# One rank per core is what the tests and the demo run; more threads only fight over the cores.
export OMP_NUM_THREADS ?= 1
# The venv's cmake and ninja, not those that the machine may have.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install demo test python-test native-test native-plain native-tsan native-asan ptx soak bench lint format clean \
    gpu-install gpu-test gpu-bench

help:
	@echo "make demo         train, checkpoint every iteration, kill, resume on fewer ranks"
	@echo "make test         all tests (native ones also under sanitizers)"
	@echo "make python-test  the Python tests only (PYTEST_ARGS=... are passed on)"
	@echo "make native-test  the C++ tests: plain, ThreadSanitizer, AddressSanitizer + UBSan; and ptx"
	@echo "make ptx          assemble the CUDA kernel for all architectures of today"
	@echo "make soak         $(SOAK_SAVES) saves in one job, one fault in fifty (SOAK_SAVES=...)"
	@echo "make bench        the stall benchmark (BENCH_ARGS=... are passed on)"
	@echo "make gpu-test     the tests for a GPU, in GPU_PYTHON (SANITIZER='compute-sanitizer --error-exitcode 1')"
	@echo "make gpu-bench    the GPU benchmark (GPU_BENCH_ARGS=... are passed on)"
	@echo "make lint         formatting, static analysis, types"
	@echo "make format       rewrite the sources in the house format"
	@echo "make clean        remove .venv and build/"

install: $(VENV)/installed

demo: $(VENV)/installed
	$(BIN)/python integration/demo/run.py

test: native-test python-test

python-test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

soak: $(VENV)/installed
	SOAK_SAVES=$(SOAK_SAVES) $(BIN)/python -m pytest -s tests/crash/test_soak.py $(PYTEST_ARGS)

bench: $(VENV)/installed
	$(BIN)/python benchmarks/stall.py $(BENCH_ARGS)

# --- on a machine with a GPU: with the Python and the torch that it has, and without a network -----

gpu-install:
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation .

# From elsewhere than the sources, so that what is installed is what is tested. The options of
# pyproject.toml want plugins that may not be there.
gpu-test: gpu-install
	mkdir -p build
	cd build && $(SANITIZER) $(GPU_PYTHON) -m pytest -c /dev/null --rootdir $(CURDIR)/tests \
	    --import-mode=importlib -p no:cacheprovider $(CURDIR)/tests/device/test_gpu.py $(PYTEST_ARGS)

gpu-bench: gpu-install
	$(GPU_PYTHON) benchmarks/gpu_training.py \
	    --json benchmarks/results/gpu-training-$$(date +%F).json \
	    --png benchmarks/results/gpu-training-$$(date +%F).png $(GPU_BENCH_ARGS)

# --- native tests: executables without Python, each build in a directory of its own ----------------

native-test: native-plain native-tsan native-asan ptx

native-plain: SANITIZE :=
native-tsan: SANITIZE := thread
native-asan: SANITIZE := address,undefined

native-plain native-tsan native-asan: native-%: $(VENV)/tools
	@mkdir -p build
	cmake -S native -B build/native-$* -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DDATASTATES_BUILD_TESTS=ON \
	    -DDATASTATES_BUILD_MODULE=OFF -DDATASTATES_SANITIZE="$(SANITIZE)" >build/native-$*.log \
	    || { cat build/native-$*.log; exit 1; }
	cmake --build build/native-$* --parallel $(JOBS)
	ctest --test-dir build/native-$* --output-on-failure --no-tests=error --timeout 300

# NVIDIA's assembler, which no part of the package needs: drivers have one of their own.
PTXAS_PACKAGE := nvidia-cuda-nvcc==13.5.37
ARCHITECTURES := 75 80 86 87 88 89 90 100 103 110 120 121

ptx: native-plain
	test -x build/ptxas/nvidia/cu13/bin/ptxas || \
	    $(PIP) install --quiet --no-deps --target build/ptxas $(PIP_ARGS) $(PTXAS_PACKAGE)
	build/native-plain/tests/copy_kernel_test --ptx >build/copy_kernel.ptx
	for each in $(ARCHITECTURES); do \
	    build/ptxas/nvidia/cu13/bin/ptxas --warning-as-error --gpu-name sm_$$each \
	        --output-file build/copy_kernel.cubin build/copy_kernel.ptx || exit 1; \
	done

# --- static checks ----------------------------------------------------------------------------

lint: $(VENV)/installed
	ruff format --check $(PYTHON_SOURCES)
	ruff check $(PYTHON_SOURCES)
	mypy
	clang-format --dry-run --Werror $(CPP_SOURCES)
	@mkdir -p build
	cmake -S native -B build/lint -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
	    -DDATASTATES_BUILD_TESTS=ON -DDATASTATES_BUILD_MODULE=ON \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	    -Dpybind11_DIR="$$(pybind11-config --cmakedir)" >build/lint.log \
	    || { cat build/lint.log; exit 1; }
	run-clang-tidy.py -quiet -j $(JOBS) -p build/lint 'native/' >build/tidy.log 2>&1 \
	    || { cat build/tidy.log; exit 1; }

format: $(VENV)/tools
	ruff check --fix-only --quiet $(PYTHON_SOURCES)
	ruff format $(PYTHON_SOURCES)
	clang-format -i $(CPP_SOURCES)

CPP_SOURCES = $(filter %.cpp %.h %.hpp %.cc,$(NATIVE_SOURCES))

# --- set-up -------------------------------------------------------------------------------------

# Alone and first: pip picks the newest build that satisfies the pin (a local CPU build, where the
# index has one), and nothing that follows may replace it.
$(VENV)/torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	@touch $@

# Everything else that is pinned and needed to build, test and check.
$(VENV)/tools: $(VENV)/torch pyproject.toml
	$(INSTALL) cmake ninja pybind11 scikit-build-core numpy safetensors fsspec typing_extensions \
	    hypothesis pytest pytest-timeout pytest-xdist rich clang-format clang-tidy mypy ruff
	@touch $@

# Editable: Python files run from the tree; the native module lies in the venv, and is rebuilt when
# its sources change.
$(VENV)/installed: $(VENV)/tools $(NATIVE_SOURCES) pyproject.toml
	$(INSTALL) --no-build-isolation --editable '.[test,lint,torchtitan]'
	@touch $@

clean:
	rm -rf $(VENV) build
