# Every target but test-gpu does its own set-up: a Python >= 3.10 with venv, and a C++ compiler, are all it needs.
#
#   make demo      train a small Gemma-2 through the ops, compiled, beside its eager attention
#   make test      the whole suite, against the built and installed wheel
#   make help      the rest

PYTHON ?= python3
TORCH  ?= torch==2.13.0
PYTEST ?= --numprocesses 2

VENV    := .venv
WHEEL   := dist/built
SOURCES := $(shell find softcap_ops csrc -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu*') \
           setup.py pyproject.toml README.md
SANITIZED := $(addprefix tests/test_,cpu_kernel_raw.py parity.py contract.py properties.py decode.py)
# What differs between versions of torch and transformers; all of the suite on them: make test-oldest test-newest ENDS=
ENDS ?= $(addprefix tests/test_,schemas.py opcheck.py fake.py parity.py gradcheck.py autograd.py autocast.py compile.py \
          modules.py errors.py contract.py imports.py export.py onnx.py vmap.py flops.py decode.py \
          decode_transforms.py transformers.py)
BUILD_REQUIREMENTS := "setuptools>=77" wheel ninja numpy

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-oldest test-newest test-gpu fuzz sanitize bench lint wheel clean
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo            train a small Gemma-2 through the ops
demo: $(VENV)/installed
	$(VENV)/bin/python examples/train_gemma2.py

## make test            the whole suite on $(TORCH)
test: $(VENV)/installed
	$(VENV)/bin/pytest $(PYTEST)

## make test-oldest     the version-dependent part of it on the oldest supported torch and transformers, same wheel
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/pytest $(PYTEST) $(ENDS)

## make test-newest     the same on the newest that install
test-newest: .venv-newest/installed
	.venv-newest/bin/pytest $(PYTEST) $(ENDS)

## make test-gpu        the suite's CUDA part, on a machine with a GPU, in the Python of your choice
# With pytest-xdist installed, a worker a core: they share the GPU, and compile in their own process. The tests that need
# much of its memory come after them.
test-gpu:
	workers=$$($(PYTHON) -c "import xdist" 2>/dev/null && echo --numprocesses auto --maxprocesses 16 --dist loadgroup); \
	    env $${workers:+TORCHINDUCTOR_COMPILE_THREADS=1} $(PYTHON) -m pytest -rfE $$workers -m "not large" tests/gpu; \
	    status=$$?; $(PYTHON) -m pytest -rfE -m large tests/gpu && exit $$status

## make fuzz            the property suite with 10,000 draws
fuzz: $(VENV)/installed
	SOFTCAP_OPS_FUZZ=1 $(VENV)/bin/pytest $(PYTEST) --timeout 3600 tests/test_properties.py

## make sanitize        the kernel's tests under AddressSanitizer and UBSan
sanitize: $(VENV)/installed
	SOFTCAP_OPS_SANITIZE=1 SOFTCAP_OPS_REQUIRE_EXTENSION=1 \
	    $(VENV)/bin/python setup.py -q build --build-base build/sanitize --build-lib build/sanitize/lib
	env PYTHONPATH=$(CURDIR)/build/sanitize/lib \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(VENV)/bin/pytest $(PYTEST) --timeout 1800 $(wildcard $(SANITIZED))

## make bench           the CPU benchmark; writes benchmarks/results/cpu.json
bench: $(VENV)/installed
	$(VENV)/bin/python benchmarks/bench_cpu.py

## make lint            ruff, mypy, clang-format
lint: $(VENV)/linters
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files csrc)

## make wheel           one wheel in dist/, for every Python >= 3.10 and torch >= 2.11
wheel: $(WHEEL)

## make clean           forget every build and environment
clean:
	rm -rf .venv .venv-* build dist *.egg-info softcap_ops/*.so

# ---- environments -------------------------------------------------------------------------------------------------

.venv/torch:        REQUIREMENT := $(TORCH)
.venv-oldest/torch: REQUIREMENT := torch==2.11.0
.venv-newest/torch: REQUIREMENT := torch>=2.11
.venv-oldest/installed: PINNED := transformers==5.4.0

%/torch:
	$(PYTHON) -m venv $*
	$*/bin/pip install --quiet $(BUILD_REQUIREMENTS) "$(REQUIREMENT)"
	@touch $@

# --no-build-isolation: the wheel is built against the torch that is already here, not against a second download.
# build/ is kept for the objects, so that a change of Python alone compiles nothing; its copies of our modules are not.
$(WHEEL): $(SOURCES) | $(VENV)/torch
	@if test setup.py -nt $@; then rm -rf build; fi
	@rm -rf dist build/bdist* && find build -path 'build/lib*' -name '*.py' -delete 2>/dev/null || true
	SOFTCAP_OPS_REQUIRE_EXTENSION=1 $(VENV)/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@touch $@

%/installed: $(WHEEL) | %/torch
	$*/bin/pip install --quiet "$$(ls dist/*.whl)[test,demo]" $(PINNED)
	$*/bin/pip install --quiet --force-reinstall --no-deps dist/*.whl
	@touch $@

$(VENV)/linters: pyproject.toml | $(VENV)/installed
	$(VENV)/bin/pip install --quiet "$$(ls dist/*.whl)[dev]"
	@touch $@

.PRECIOUS: %/torch %/installed
