# make demo: the demo, on a fresh Debian or Ubuntu machine with python3 >= 3.10.
# make test: everything that must be clean.
# Both install what they need first: system packages only when missing, the rest in $(VENV).

VENV ?= .venv
PYTHON_BIN = $(abspath $(VENV))/bin/python
STAGE = tools/stage.sh
PYTEST_ARGS ?=
BUILD_ARGS ?=
BENCH_ARGS ?=
COMPARE_ARGS ?=

# The tests start thousands of interpreters. Some container images set this, and then each of them
# would compile all modules of pccl.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-integrations install setup build lint format types docs stress fuzz soak bench bench-check compare package package-test release check-macos check-containers test-posix test-aarch64 package-aarch64 clean

# A tree that is set up for development runs the demo from its editable build; any other from a
# plain install.
ifneq ($(wildcard $(VENV)/requirements-dev.installed),)
demo: build
else
demo: install
endif
	$(PYTHON_BIN) examples/digits.py

# For a first look, so what takes time is left out. -O1 compiles faster than a wheel's -O3; the
# loops that reduce have -O3 here, too. Python compiles what is imported, not all of SciPy.
install:
	@$(STAGE) set-up tools/setup.sh $(VENV)
	@$(STAGE) install $(PYTHON_BIN) -m pip install -q --no-compile -c requirements-dev.txt \
	  -C cmake.define.CMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' '.[demo]'

# pytest comes last, so that its summary is what one sees last. Four at a time: most tests wait for
# processes.
test: build lint types docs stress fuzz
	@mkdir -p build
	@bash -o pipefail -c '$(PYTHON_BIN) -m pytest -n 4 --dist worksteal $(PYTEST_ARGS) 2>&1 | tee build/pytest.txt'

# Lightning, Fabric, Accelerate, transformers, Ray, torchft, Flax and orbax over pccl, in an
# environment of its own: build/integrations-venv. Some minutes after the installation. Flower has
# another one, since it does not go with the others' versions of rich.
test-integrations:
	@$(STAGE) set-up tools/setup.sh build/integrations-venv
	@$(STAGE) install build/integrations-venv/bin/python -m pip install -q -c requirements-dev.txt \
	  -r requirements-integrations.txt pytest pytest-timeout hypothesis '.[torch]'
	build/integrations-venv/bin/pytest $(PYTEST_ARGS) tests/integrations
	@$(STAGE) set-up tools/setup.sh build/flower-venv
	@$(STAGE) install build/flower-venv/bin/python -m pip install -q flwr==1.42.0 pytest pytest-timeout hypothesis .
	build/flower-venv/bin/pytest $(PYTEST_ARGS) tests/integrations/test_flower.py

setup:
	@$(STAGE) set-up tools/setup.sh $(VENV) dev

build: setup
	@$(STAGE) build $(PYTHON_BIN) -m pip install -q --no-build-isolation --no-deps $(BUILD_ARGS) -e .

lint: setup
	@$(STAGE) lint tools/lint.sh $(VENV)

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find cpp benchmarks -name '*.h' -print0 -o -name '*.inl' -print0 -o -name '*.cpp' -print0 | xargs -0 $(VENV)/bin/clang-format -i

types: setup
	@$(STAGE) types tools/typecheck.sh $(PYTHON_BIN)

# The pages and the reference made from docstrings, as a site in build/site. Warnings are errors.
docs: setup
	@$(STAGE) docs tools/build_site.sh $(PYTHON_BIN)

stress: setup
	@$(STAGE) "stress, ASan + UBSan" tools/stress.sh address,undefined
	@$(STAGE) "stress, TSan" tools/stress.sh thread

# Seconds for each of the four targets; one target runs on each core. 80 s of CPU time in all,
# without the build.
FUZZ_SECONDS ?= 20
fuzz:
	@$(STAGE) "set-up, clang" tools/setup.sh $(VENV) fuzz
	@$(STAGE) "fuzz, ASan + UBSan" tools/fuzz.sh $(FUZZ_SECONDS)

# The same tests for hours instead of minutes. Every number may be given on the command line.
soak: export PCCL_SOAK = 1
soak: export HYPOTHESIS_PROFILE = soak
soak: export PCCL_SIM_SCHEDULES ?= 200000
soak: export PCCL_KILLS ?= 2000
soak: export PCCL_STRESS_SECONDS ?= 1800
soak: export PCCL_STRESS_KILLS ?= 1000
soak: export PCCL_STRESS_FREEZES ?= 1000
soak: export PCCL_STRESS_MINUTES ?= 30
soak: export PCCL_LEAK_CYCLES ?= 5000
soak: FUZZ_SECONDS = 3600
soak: build stress fuzz
	$(PYTHON_BIN) -m pytest --timeout 14400 $(PYTEST_ARGS)

# A plain install in an environment of its own: the editable build has assertions on. Tables,
# results and plot: build/.
bench:
	@$(STAGE) set-up tools/setup.sh build/bench bench
	@$(STAGE) install build/bench/bin/python -m pip install -q -c requirements-dev.txt '.[bench]' mpi4py==4.1.2
	build/bench/bin/python benchmarks/allreduce.py --transport all --extras all --json build/allreduce.json \
	  --markdown build/allreduce.md --plot build/allreduce.svg $(BENCH_ARGS)

# Whether this tree is slower than the commit BASE: both are measured in turns, 10 minutes after the
# builds. Exit status 1: two measurements say that a row is slower by more than its spread.
bench-check:
	@test -n "$(BASE)" || { echo "usage: make bench-check BASE=COMMIT" >&2; exit 2; }
	@$(STAGE) set-up tools/setup.sh build/bench-check/venv
	@$(STAGE) install build/bench-check/venv/bin/python -m pip install -q -c requirements-dev.txt . ml_dtypes
	build/bench-check/venv/bin/python benchmarks/check.py $(BASE) $(BENCH_ARGS)

# pccl beside Gloo, MPI, torchft, hivemind and mpi4jax, in an environment of its own: build/compare.
# Each is optional. 12 minutes after the installation. COMPARE_ARGS=--quick shows that it runs.
compare:
	@$(STAGE) set-up tools/setup.sh build/compare
	build/compare/bin/python benchmarks/compare/run.py $(COMPARE_ARGS)

# In dist/: the sdist and a wheel for every CPython from 3.10 on, on Linux with glibc 2.28 or newer.
package:
	@$(STAGE) package tools/wheel/build.sh dist

# The wheel on systems without compiler, OpenSSL and Asio. Needs root; downloads some 500 MB.
package-test:
	@$(STAGE) package-test tools/wheel/test_in_root.sh dist

# `make package` with the newest OpenSSL of Debian, and the checks of a release.
# Nothing is uploaded. docs/internals/release.md has the steps before and after.
release:
	@$(STAGE) package tools/wheel/build.sh --clean dist
	@$(STAGE) release build/release/bin/python tools/wheel/check.py --release dist

# Compiles the engine for macOS, and links the C library; for FreeBSD only the rooms that call the
# system. Nothing of it can run here. A stage of .ci/run, and not a part of `make test`.
check-macos: setup
	@$(STAGE) "macOS and FreeBSD, compile only" tools/check_macos.sh $(PYTHON_BIN) all

# The images of deploy/Containerfile, from the wheel that `make package` leaves in dist/, and a run
# of three containers. Needs root and podman, and says so without. Not a part of `make test`.
check-containers:
	@tools/check_containers.sh dist

# The tests with the code that other systems than Linux use. Not a part of `make test`.
test-posix: setup
	tools/test_posix.sh $(VENV) -n 2 --dist worksteal $(PYTEST_ARGS)

# Cross-compiles for aarch64 and runs the tests of the engine in a Debian of that architecture, by
# emulation, then groups of peers of both architectures. Needs root; downloads some 150 MB.
test-aarch64: setup
	@tools/aarch64/test.sh $(VENV)

# In dist/, beside what `make package` left there: the wheel for aarch64, tried by emulation. Needs
# root.
package-aarch64:
	@ls dist/*_x86_64.whl >/dev/null 2>&1 || $(MAKE) package
	@tools/aarch64/wheel.sh dist

clean:
	rm -rf build dist $(VENV)
